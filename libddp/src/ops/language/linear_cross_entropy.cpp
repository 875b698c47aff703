// SPDX-License-Identifier: Apache-2.0
#include "ddp/ops/language.hpp"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "ops/autocast_off.hpp"
#include "ops/tensor_launch.hpp"

namespace ddp::ops {
namespace {

constexpr int64_t kRowMultiple = 128;  // of pad_rows()

// Elements of the float32 copy of a block of rows during its softmax (256 MiB).
constexpr int64_t kMaxBlockElements = int64_t{1} << 26;

struct Sums {
  at::Tensor loss;     // float32
  at::Tensor correct;  // int64
};

/// Adds the loss of some rows; with `make_grad` overwrites the logits with their gradient.
///
///   logits [rows, padded vocab], labels [rows]
void cross_entropy_block(const at::Tensor& logits, const at::Tensor& labels, int64_t vocab,
                         int64_t ignore_index, bool make_grad, Sums& sums) {
  auto valid = logits.narrow(1, 0, vocab);
  const auto counts = labels.ne(ignore_index);
  const auto target = labels.clamp_min(0).unsqueeze(1);
  sums.correct += valid.argmax(1).eq(labels).logical_and_(counts).sum();
  const auto log_softmax = at::log_softmax(valid.to(at::kFloat), 1);
  const auto log_likelihood = log_softmax.gather(1, target);
  sums.loss -= log_likelihood.squeeze(1).masked_fill(counts.logical_not(), 0).sum();
  if (make_grad) {
    // softmax - onehot. The label's entry is computed in float32: near 1 a rounded softmax would
    // lose the difference.
    at::exp_out(valid, log_softmax);
    valid.scatter_(1, target, log_likelihood.expm1().to(valid.scalar_type()));
  }
}

struct Gradients {
  at::Tensor hidden;
  at::Tensor weight;
};

/// One chunk's logits, loss and gradients.
void cross_entropy_chunk(const at::Tensor& hidden, const at::Tensor& weight,
                         const at::Tensor& labels, int64_t vocab,
                         const LinearCrossEntropyOptions& options, at::Tensor grad_hidden,
                         at::Tensor& grad_weight, bool wants_weight, Sums& sums) {
  const bool wants_hidden = grad_hidden.defined();
  auto logits = at::mm(hidden, weight.t());
  const int64_t rows = hidden.size(0);
  const int64_t block = std::clamp<int64_t>(kMaxBlockElements / vocab, 1, rows);
  for (int64_t row = 0; row < rows; row += block) {
    const int64_t count = std::min(block, rows - row);
    cross_entropy_block(logits.narrow(0, row, count), labels.narrow(0, row, count), vocab,
                        options.ignore_index, wants_hidden || wants_weight, sums);
  }
  // Ignored rows are masked on the products' narrow side, not on the wide one.
  const auto counts = labels.ne(options.ignore_index).unsqueeze(1);
  if (wants_hidden) {
    at::mm_out(grad_hidden, logits, weight);
    grad_hidden.mul_(counts);
  }
  if (wants_weight) {
    const auto product = at::mm(logits.t(), hidden * counts);
    if (!grad_weight.defined()) {
      grad_weight = product;
    } else {
      grad_weight.add_(product);
    }
  }
}

class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const at::Tensor& hidden, const at::Tensor& weight,
                                                const at::Tensor& labels, at::ScalarType dtype,
                                                const LinearCrossEntropyOptions& options,
                                                bool wants_hidden, bool wants_weight) {
    const AutocastOff no_autocast(hidden.device().type());
    const auto h = hidden.to(dtype);
    const auto w = padded_rows(weight).to(dtype);
    const int64_t tokens = h.size(0);
    const int64_t chunk =
        std::max<int64_t>(1, options.chunk_tokens > 0 ? options.chunk_tokens : tokens);
    Sums sums{at::zeros({}, h.options().dtype(at::kFloat)),
              at::zeros({}, h.options().dtype(at::kLong))};
    Gradients grad;
    if (wants_hidden) {
      grad.hidden = at::empty_like(h);
    }
    if (wants_weight && chunk < tokens) {
      grad.weight = at::zeros(w.sizes(), w.options().dtype(at::kFloat));
    }
    for (int64_t first = 0; first < tokens; first += chunk) {
      const int64_t count = std::min(chunk, tokens - first);
      cross_entropy_chunk(h.narrow(0, first, count), w, labels.narrow(0, first, count),
                          weight.size(0), options,
                          wants_hidden ? grad.hidden.narrow(0, first, count) : at::Tensor(),
                          grad.weight, wants_weight, sums);
    }
    if (grad.weight.defined()) {
      grad.weight = grad.weight.narrow(0, 0, weight.size(0));
    }
    ctx->save_for_backward({grad.hidden, grad.weight});
    ctx->saved_data["hidden_dtype"] = hidden.scalar_type();
    ctx->saved_data["weight_dtype"] = weight.scalar_type();
    ctx->mark_non_differentiable({sums.correct});
    return {sums.loss, sums.correct};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grad_outputs) {
    detail::check_differentiated_once("linear_cross_entropy");
    const AutocastOff no_autocast(grad_outputs[0].device().type());
    const auto saved = ctx->get_saved_variables();
    const auto scaled = [&](const at::Tensor& gradient, const char* dtype) {
      return gradient.defined()
                 ? gradient.mul(grad_outputs[0]).to(ctx->saved_data[dtype].toScalarType())
                 : at::Tensor();
    };
    return {scaled(saved[0], "hidden_dtype"), scaled(saved[1], "weight_dtype"), {}, {}, {}, {}, {}};
  }
};

/// The number of rows after pad_rows().
int64_t num_padded_rows(const at::Tensor& weight) {
  return (weight.size(0) + kRowMultiple - 1) / kRowMultiple * kRowMultiple;
}

/// Whether the memory comes from pad_rows(): offset 0 and the padded number of rows.
bool is_padded(const at::Tensor& weight) {
  return weight.dim() == 2 && weight.storage_offset() == 0 && weight.is_contiguous() &&
         static_cast<int64_t>(weight.storage().nbytes()) ==
             num_padded_rows(weight) * weight.size(1) * static_cast<int64_t>(weight.element_size());
}

}  // namespace

LinearCrossEntropyResult linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                              const at::Tensor& labels,
                                              const LinearCrossEntropyOptions& options) {
  TORCH_CHECK(hidden.dim() == 2 && weight.dim() == 2 && hidden.size(1) == weight.size(1) &&
                  labels.dim() == 1 && labels.size(0) == hidden.size(0) &&
                  labels.scalar_type() == at::kLong,
              "linear_cross_entropy: hidden [tokens, dim], weight [vocab, dim] and int64 labels "
              "[tokens] are needed, not ",
              hidden.sizes(), ", ", weight.sizes(), " and ", labels.sizes(), " of ",
              labels.scalar_type());
  const auto device = hidden.device().type();
  const auto dtype = at::autocast::is_autocast_enabled(device)
                         ? at::autocast::get_autocast_dtype(device)
                         : hidden.scalar_type();
  const bool grads = at::GradMode::is_enabled();
  auto outputs =
      LinearCrossEntropy::apply(hidden, weight, labels, dtype, options,
                                grads && hidden.requires_grad(), grads && weight.requires_grad());
  return {outputs[0], outputs[1]};
}

void pad_rows(at::Tensor& weight) {
  const int64_t rows = num_padded_rows(weight);
  if (rows == weight.size(0) || is_padded(weight)) {
    return;
  }
  const at::NoGradGuard no_grad;
  auto padded = at::zeros({rows, weight.size(1)}, weight.options());
  auto inside = padded.narrow(0, 0, weight.size(0));
  inside.copy_(weight);
  weight.set_data(inside);
}

at::Tensor padded_rows(const at::Tensor& weight) {
  const at::NoGradGuard no_grad;
  const auto plain = weight.detach();
  return is_padded(weight)
             ? plain.as_strided({num_padded_rows(weight), weight.size(1)}, plain.strides())
             : plain;
}

}  // namespace ddp::ops
