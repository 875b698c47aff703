// SPDX-License-Identifier: Apache-2.0
#include "ddp/ops/language.hpp"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "ddp/detail/model_weights.hpp"
#include "ops/gemm/gemm.hpp"
#include "ops/grad_target.hpp"
#include "ops/shared/autocast_off.hpp"
#include "ops/tensor_launch.hpp"
#ifdef DDP_HAS_CUDA
#include "ops/language/column_sums.hpp"
#include "ops/language/head_loss_kernels.hpp"
#endif

namespace ddp::ops {
namespace {

constexpr int64_t kRowMultiple = 128;  // of pad_rows()

// Elements of the float32 copy of a block of rows during its softmax (256 MiB).
constexpr int64_t kMaxBlockElements = int64_t{1} << 26;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct Sums {
  at::Tensor loss;     // float32
  at::Tensor correct;  // int64
  at::Tensor targets;  // int64, complete at once; the others grow by block
};

Sums new_sums(const at::Tensor& hidden, const at::Tensor& labels,
              const LinearCrossEntropyOptions& options) {
  return {at::zeros({}, hidden.options().dtype(at::kFloat)),
          at::zeros({}, hidden.options().dtype(at::kLong)), labels.ne(options.ignore_index).sum()};
}

/// Adds the loss of some rows; with `make_grad` overwrites the logits with their gradient.
///
///   logits [rows, padded vocab], labels [rows]
void loss_by_aten(const at::Tensor& logits, const at::Tensor& labels, int64_t vocab,
                  const LinearCrossEntropyOptions& options, bool make_grad, Sums& sums) {
  const double smoothing = options.label_smoothing, z = options.z_loss;
  auto valid = logits.narrow(1, 0, vocab);
  const auto counts = labels.ne(options.ignore_index);
  const auto target = labels.clamp(0, vocab - 1).unsqueeze(1);
  const auto is_wrong = labels.ne(target.squeeze(1)).logical_and_(counts);
  const auto [largest, place] = valid.max(1);
  sums.correct += place.eq(labels).logical_and_(largest.isfinite()).logical_and_(counts).sum();
  const auto log_softmax = at::log_softmax(valid.to(at::kFloat), 1);
  const auto log_likelihood =
      log_softmax.gather(1, target).masked_fill_(is_wrong.unsqueeze(1), kNan);
  auto losses = log_likelihood * (smoothing - 1);
  if (smoothing > 0) {
    losses -= log_softmax.mean(1, /*keepdim=*/true) * smoothing;
  }
  at::Tensor log_sum;
  if (z > 0) {
    log_sum = at::logsumexp(valid.to(at::kFloat), 1, /*keepdim=*/true);
    losses += log_sum.square() * z;
  }
  sums.loss += losses.squeeze(1).masked_fill(counts.logical_not(), 0).sum();
  if (make_grad) {
    // p (1 + 2 z L) - (1 - s) onehot - s / vocab with p = softmax. Near 1 a rounded p would lose
    // the difference p - 1. So the label's entry has (1 - s) expm1(log p) + s (p - 1 / vocab).
    const double uniform = 1 / static_cast<double>(vocab);
    const auto likelihood = log_likelihood.exp();
    auto at_label = log_likelihood.expm1();
    auto gradient = log_softmax.exp_();
    if (smoothing > 0) {
      at_label = at_label * (1 - smoothing) + (likelihood - uniform) * smoothing;
    }
    if (z > 0) {
      at_label += likelihood * log_sum * (2 * z);
      gradient *= log_sum * (2 * z) + 1;
    }
    if (smoothing > 0) {
      gradient -= smoothing * uniform;
    }
    gradient.scatter_(1, target, at_label);
    gradient.masked_fill_(counts.logical_not().unsqueeze(1), 0);
    valid.copy_(gradient);  // the only rounding to the logits' dtype
    // Of a hidden state that is not finite, these logits are NaN.
    logits.narrow(1, vocab, logits.size(1) - vocab).zero_();
  }
}

#ifdef DDP_HAS_CUDA
void loss_by_kernel(const at::Tensor& logits, const at::Tensor& labels, int64_t vocab,
                    const LinearCrossEntropyOptions& options, bool make_grad, Sums& sums) {
  const c10::cuda::CUDAGuard device(logits.device());
  const auto losses = at::empty(labels.sizes(), sums.loss.options());
  const auto marks = at::empty(labels.sizes(), labels.options().dtype(at::kInt));
  C10_CUDA_CHECK(
      detail::launch_head_loss({.logits = logits.mutable_data_ptr(),
                                .element = detail::element_of(logits.scalar_type()),
                                .labels = labels.const_data_ptr<int64_t>(),
                                .rows = logits.size(0),
                                .vocab = vocab,
                                .leading = logits.stride(0),
                                .ignore_index = options.ignore_index,
                                .label_smoothing = static_cast<float>(options.label_smoothing),
                                .z_loss = static_cast<float>(options.z_loss)},
                               make_grad,
                               {.row_losses = losses.mutable_data_ptr<float>(),
                                .row_marks = marks.mutable_data_ptr<int>(),
                                .loss = sums.loss.mutable_data_ptr<float>(),
                                .num_correct = sums.correct.mutable_data_ptr<int64_t>()},
                               detail::stream_of(logits)));
}
#endif

/// Adds the loss of all rows; with `make_grad` overwrites the logits with their gradient.
void add_loss(const at::Tensor& logits, const at::Tensor& labels, int64_t vocab,
              const LinearCrossEntropyOptions& options, bool make_grad, Sums& sums) {
#ifdef DDP_HAS_CUDA
  if (detail::runs_own_kernels(logits, logits.scalar_type()) && logits.stride(0) % 8 == 0) {
    return loss_by_kernel(logits, labels.contiguous(), vocab, options, make_grad, sums);
  }
#endif
  const int64_t rows = logits.size(0);
  const int64_t block =
      std::clamp<int64_t>(kMaxBlockElements / vocab, 1, std::max<int64_t>(rows, 1));
  for (int64_t row = 0; row < rows; row += block) {
    const int64_t count = std::min(block, rows - row);
    loss_by_aten(logits.narrow(0, row, count), labels.narrow(0, row, count), vocab, options,
                 make_grad, sums);
  }
}

/// PyTorch's gradients are zero if every row is ignored. The gradient of their mean is then
/// infinite, and its product with zero would be NaN.
at::Tensor finite_without_rows(const at::Tensor& grad_loss, const at::Tensor& num_targets) {
  return grad_loss.masked_fill(num_targets.eq(0), 0);
}

/// `bias` in `dtype`, zero for the rows that pad_rows() added; undefined without bias.
at::Tensor padded_bias(const std::optional<at::Tensor>& bias, int64_t rows, at::ScalarType dtype) {
  return bias ? at::constant_pad_nd(bias->detach().to(dtype), {0, rows - bias->size(0)})
              : at::Tensor();
}

at::Tensor logits_of(const at::Tensor& hidden, const at::Tensor& padded_weight,
                     const at::Tensor& padded_bias) {
  const auto logits = at::empty({hidden.size(0), padded_weight.size(0)}, hidden.options());
  detail::gemm(logits, hidden, padded_weight.t(), {.bias = padded_bias});
  return logits;
}

/// The gradient of the padded bias, in float32 (float64 for float64).
at::Tensor column_sums(const at::Tensor& grad_logits) {
#ifdef DDP_HAS_CUDA
  const int64_t rows = grad_logits.size(0), columns = grad_logits.size(1);
  if (detail::runs_own_kernels(grad_logits, grad_logits.scalar_type()) && rows > 0 &&
      columns % 8 == 0) {
    const c10::cuda::CUDAGuard device(grad_logits.device());
    const auto memory = grad_logits.options().dtype(at::kFloat);
    const auto scratch = at::empty({detail::num_column_parts(rows, columns), columns}, memory);
    const detail::GradTarget sums{at::empty({columns}, memory)};
    C10_CUDA_CHECK(detail::launch_column_sums(
        grad_logits.const_data_ptr(), detail::element_of(grad_logits.scalar_type()), rows, columns,
        scratch.mutable_data_ptr<float>(), detail::grad_out(sums), detail::stream_of(grad_logits)));
    return sums.memory;
  }
#endif
  return grad_logits.sum(0, false,
                         grad_logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

/// target = beta target + grad_logitsᵀ hidden. cublasLt's fastest kernels need a multiple of 8
/// rows, so the few rows behind the last multiple are a product of their own.
void write_weight_gradient(const detail::GradTarget& target, const at::Tensor& grad_logits,
                           const at::Tensor& hidden) {
  const int64_t vocab = target.memory.size(0), most = vocab / 8 * 8;
  for (const auto& [first, count] : {std::pair{int64_t{0}, most}, std::pair{most, vocab - most}}) {
    if (count > 0) {
      detail::gemm_into(target.memory.narrow(0, first, count), target.beta,
                        grad_logits.narrow(1, first, count).t(), hidden);
    }
  }
}

/// All logits at once. Their gradient takes their place until the backward, where the weight's
/// gradient goes straight to its slot.
class WholeHeadLoss : public torch::autograd::Function<WholeHeadLoss> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const at::Tensor& hidden, const at::Tensor& weight,
                                                const std::optional<at::Tensor>& bias,
                                                const at::Tensor& labels, at::ScalarType dtype,
                                                const LinearCrossEntropyOptions& options,
                                                bool makes_grad) {
    const AutocastOff no_autocast(hidden.device().type());
    const auto h = hidden.to(dtype).contiguous();
    const auto w = padded_rows(weight).to(dtype);
    Sums sums = new_sums(h, labels, options);
    const auto logits = logits_of(h, w, padded_bias(bias, w.size(0), dtype));
    add_loss(logits, labels, weight.size(0), options, makes_grad, sums);
    if (makes_grad) {
      ctx->save_for_backward({h, w, weight, logits, bias.value_or(at::Tensor()), sums.targets});
      ctx->saved_data["hidden_dtype"] = hidden.scalar_type();
    }
    ctx->mark_non_differentiable({sums.correct, sums.targets});
    ctx->set_materialize_grads(false);
    return {sums.loss, sums.correct, sums.targets};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grad_outputs) {
    detail::check_differentiated_once("linear_cross_entropy");
    if (!grad_outputs[0].defined()) {
      return torch::autograd::variable_list(7);
    }
    const AutocastOff no_autocast(grad_outputs[0].device().type());
    const auto saved = ctx->get_saved_variables();
    const auto &h = saved[0], &w = saved[1], &weight = saved[2], &grad_logits = saved[3];
    const auto scale = finite_without_rows(grad_outputs[0], saved[5]);
    const auto target = detail::grad_target(weight, ctx->needs_input_grad(1));
    if (target.memory.defined() && h.scalar_type() != at::kHalf) {
      write_weight_gradient(target, grad_logits, h * scale);
    } else if (target.memory.defined()) {
      // A loss scale times `h` would exceed float16.
      const auto product = at::empty(weight.sizes(), h.options().dtype(at::kFloat));
      write_weight_gradient({product}, grad_logits, h);
      target.write(product.mul_(scale));
    }
    const auto bias_target =
        detail::grad_target(saved[4], saved[4].defined() && ctx->needs_input_grad(2));
    if (bias_target.memory.defined()) {
      bias_target.write(column_sums(grad_logits).narrow(0, 0, weight.size(0)).mul_(scale));
    }
    // Last, because a step needs the most memory here and the scaled copy of `h` is gone by now.
    at::Tensor grad_hidden;
    if (ctx->needs_input_grad(0)) {
      grad_hidden = at::empty_like(h);
      detail::gemm(grad_hidden, grad_logits, w);
      grad_hidden = grad_hidden.mul_(scale).to(ctx->saved_data["hidden_dtype"].toScalarType());
    }
    return {grad_hidden, target.result(), bias_target.result(), {}, {}, {}, {}};
  }
};

struct WantedGradients {
  bool hidden, weight, bias;
  bool any() const { return hidden || weight || bias; }
};

/// A few rows of logits at a time. The gradients are computed in the forward, while a chunk's
/// logits are there.
class ChunkedHeadLoss : public torch::autograd::Function<ChunkedHeadLoss> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const at::Tensor& hidden, const at::Tensor& weight,
                                                const std::optional<at::Tensor>& bias,
                                                const at::Tensor& labels, at::ScalarType dtype,
                                                const LinearCrossEntropyOptions& options,
                                                const WantedGradients& wanted) {
    const AutocastOff no_autocast(hidden.device().type());
    const auto h = hidden.to(dtype).contiguous();
    const auto w = padded_rows(weight).to(dtype);
    Sums sums = new_sums(h, labels, options);
    const auto b = padded_bias(bias, w.size(0), dtype);
    at::Tensor grad_hidden, grad_weight, grad_bias;
    if (wanted.hidden) {
      grad_hidden = at::empty_like(h);
    }
    if (wanted.weight) {
      grad_weight = at::zeros(w.sizes(), w.options().dtype(at::kFloat));
    }
    if (wanted.bias) {
      grad_bias = at::zeros({w.size(0)}, w.options().dtype(at::kFloat));
    }
    for (int64_t first = 0; first < h.size(0); first += options.chunk_tokens) {
      const int64_t count = std::min(options.chunk_tokens, h.size(0) - first);
      const auto rows = h.narrow(0, first, count);
      const auto logits = logits_of(rows, w, b);
      add_loss(logits, labels.narrow(0, first, count), weight.size(0), options, wanted.any(), sums);
      if (wanted.hidden) {
        detail::gemm(grad_hidden.narrow(0, first, count), logits, w);
      }
      if (wanted.weight) {
        detail::gemm(grad_weight, logits.t(), rows, {.beta = 1});
      }
      if (wanted.bias) {
        grad_bias += column_sums(logits);
      }
    }
    if (wanted.weight) {
      grad_weight = grad_weight.narrow(0, 0, weight.size(0));
    }
    if (wanted.bias) {
      grad_bias = grad_bias.narrow(0, 0, weight.size(0));
      ctx->saved_data["bias_dtype"] = bias->scalar_type();
    }
    ctx->save_for_backward({grad_hidden, grad_weight, grad_bias, sums.targets});
    ctx->saved_data["hidden_dtype"] = hidden.scalar_type();
    ctx->saved_data["weight_dtype"] = weight.scalar_type();
    ctx->mark_non_differentiable({sums.correct, sums.targets});
    ctx->set_materialize_grads(false);
    return {sums.loss, sums.correct, sums.targets};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grad_outputs) {
    detail::check_differentiated_once("linear_cross_entropy");
    if (!grad_outputs[0].defined()) {
      return torch::autograd::variable_list(7);
    }
    const AutocastOff no_autocast(grad_outputs[0].device().type());
    const auto saved = ctx->get_saved_variables();
    const auto scale = finite_without_rows(grad_outputs[0], saved[3]);
    const auto scaled = [&](const at::Tensor& gradient, const char* dtype) {
      return gradient.defined() ? gradient.mul(scale).to(ctx->saved_data[dtype].toScalarType())
                                : at::Tensor();
    };
    return {scaled(saved[0], "hidden_dtype"),
            scaled(saved[1], "weight_dtype"),
            scaled(saved[2], "bias_dtype"),
            {},
            {},
            {},
            {}};
  }
};

/// The number of rows after pad_rows().
int64_t num_padded_rows(const at::Tensor& weight) {
  return (weight.size(0) + kRowMultiple - 1) / kRowMultiple * kRowMultiple;
}

/// The memory that pad_rows() has made. Sizes alone would not tell it from a slice of a matrix,
/// whose further rows are not zero.
class PaddedMemory {
 public:
  void add(const at::Tensor& weight) {
    const std::lock_guard lock(mutex_);
    std::erase_if(entries_, [](const Entry& entry) { return entry.storage.expired(); });
    entries_.push_back({weight.storage().getWeakStorageImpl(), weight.sizes().vec()});
  }

  bool holds(const at::Tensor& weight) {
    if (weight.dim() != 2 || weight.storage_offset() != 0 || !weight.is_contiguous()) {
      return false;
    }
    const std::lock_guard lock(mutex_);
    return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
      return entry.storage._unsafe_get_target() == weight.storage().unsafeGetStorageImpl() &&
             weight.sizes().equals(entry.sizes);
    });
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // no other storage gets its address
    std::vector<int64_t> sizes;                         // without the padding
  };
  std::mutex mutex_;
  std::vector<Entry> entries_;
};

PaddedMemory& padded_memory() {
  static auto& memory = *new PaddedMemory;  // never destroyed: a model may be static
  return memory;
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
  detail::check_same_device("linear_cross_entropy", hidden, "weight", weight);
  detail::check_same_device("linear_cross_entropy", hidden, "labels", labels);
  TORCH_CHECK(options.label_smoothing >= 0 && options.label_smoothing <= 1,
              "linear_cross_entropy: label_smoothing must lie in [0, 1], not ",
              options.label_smoothing);
  TORCH_CHECK(options.z_loss >= 0, "linear_cross_entropy: z_loss must not be negative, but is ",
              options.z_loss);
  const auto& bias = options.bias;
  if (bias.defined()) {
    TORCH_CHECK(bias.dim() == 1 && bias.size(0) == weight.size(0),
                "linear_cross_entropy: the bias must be [vocab] = [", weight.size(0), "], not ",
                bias.sizes());
    detail::check_same_device("linear_cross_entropy", hidden, "bias", bias);
  }
  const auto device = hidden.device().type();
  const auto dtype = at::autocast::is_autocast_enabled(device)
                         ? at::autocast::get_autocast_dtype(device)
                         : hidden.scalar_type();
  const auto wants = [](const at::Tensor& tensor) {
    return at::GradMode::is_enabled() && tensor.defined() && tensor.requires_grad();
  };
  const WantedGradients wanted{wants(hidden), wants(weight), wants(bias)};
  const bool is_chunked = options.chunk_tokens > 0 && options.chunk_tokens < hidden.size(0);
  // LibTorch refuses an undefined tensor here, but not an empty optional.
  const auto maybe_bias = bias.defined() ? std::optional(bias) : std::nullopt;
  const auto outputs =
      is_chunked
          ? ChunkedHeadLoss::apply(hidden, weight, maybe_bias, labels, dtype, options, wanted)
          : WholeHeadLoss::apply(hidden, weight, maybe_bias, labels, dtype, options, wanted.any());
  return {outputs[0], outputs[1], outputs[2]};
}

void pad_rows(at::Tensor& weight) {
  const int64_t rows = num_padded_rows(weight);
  if (rows == weight.size(0) || padded_memory().holds(weight)) {
    return;
  }
  // In inference mode the memory would never be trained.
  const c10::InferenceMode as_weight(weight.is_inference());
  const at::NoGradGuard no_grad;
  auto padded = at::zeros({rows, weight.size(1)}, weight.options());
  auto inside = padded.narrow(0, 0, weight.size(0));
  inside.copy_(weight);
  weight.set_data(inside);
  padded_memory().add(weight);
}

at::Tensor padded_rows(const at::Tensor& weight) {
  const at::NoGradGuard no_grad;
  const auto plain = weight.detach();
  return padded_memory().holds(weight)
             ? plain.as_strided({num_padded_rows(weight), weight.size(1)}, plain.strides())
             : plain;
}

}  // namespace ddp::ops
