// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "ddp/detail/model_weights.hpp"
#include "ddp/ops/language.hpp"
#include "ops/gemm/gemm.hpp"
#include "ops/grad_target.hpp"
#include "ops/language/dropout.hpp"
#include "ops/language/fp8.hpp"
#include "ops/language/gated_activation.hpp"
#include "ops/shared/autocast_off.hpp"
#include "ops/shared/flop_counter.hpp"
#include "ops/tensor_launch.hpp"
#ifdef DDP_HAS_CUDA
#include "ops/language/column_sums.hpp"
#include "ops/language/lora_kernels.hpp"
#endif

namespace ddp::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What the layers of a call and their adapters share.
struct Adapters {
  int64_t rank;
  std::vector<int64_t> out_sizes;
  double scale;
  double dropout_p;

  int64_t count() const { return static_cast<int64_t>(out_sizes.size()); }

  /// Calls `call(out, rank)` with each layer's slice of the outputs and of the ranks.
  template <typename Call>
  void for_each(Call&& call) const {
    int64_t begin = 0, first_rank = 0;
    for (const int64_t size : out_sizes) {
      call(at::indexing::Slice(begin, begin + size),
           at::indexing::Slice(first_rank, first_rank + rank));
      begin += size;
      first_rank += rank;
    }
  }
};

using at::indexing::Slice;

at::Tensor columns(const at::Tensor& matrix, const Slice& slice) {
  return matrix.index({Slice(), slice});
}
at::Tensor as_rows(const at::Tensor& tensor) {
  return tensor.reshape({-1, tensor.size(-1)});
}
at::Tensor rows(const at::Tensor& matrix, const Slice& slice) {
  return matrix.index({slice});
}

/// The thin products with the dropped input x', by kernels that draw the masks again each time, or
/// by ATen with stored masks, which defines them.
class DroppedInput {
 public:
  /// In the forward: draws the masks. `stored` is what the backward must be given.
  DroppedInput(const at::Tensor& x, const Adapters& adapters)
      : x_(x), adapters_(adapters), by_kernels_(fits_kernels()) {
    if (adapters.dropout_p == 0) {
      return;
    }
#ifdef DDP_HAS_CUDA
    if (by_kernels_) {
      draws_ = detail::new_draws(adapters.dropout_p, x.device(), stored_,
                                 static_cast<uint64_t>(adapters.count()));
      return;
    }
#endif
    std::vector<at::Tensor> masks;
    for (int64_t i = 0; i < adapters.count(); ++i) {
      masks.push_back(std::get<1>(at::native_dropout(x, adapters.dropout_p, true)));
    }
    stored_ = at::stack(masks);
  }
  /// In the backward.
  DroppedInput(const at::Tensor& x, const Adapters& adapters, const at::Tensor& stored)
      : x_(x), adapters_(adapters), by_kernels_(fits_kernels()), stored_(stored) {
#ifdef DDP_HAS_CUDA
    if (by_kernels_) {
      draws_ = detail::repeated_draws(adapters.dropout_p, stored_);
    }
#endif
  }

  const at::Tensor& stored() const {
    return stored_;
  }

  /// t = x' Aᵀ of all layers, side by side.
  at::Tensor product(const at::Tensor& a) const {
    if (adapters_.dropout_p == 0) {
      const auto t = at::empty({x_.size(0), a.size(0)}, x_.options());
      detail::gemm(t, x_, a.t());
      return t;
    }
    const auto t = at::empty({x_.size(0), a.size(0)}, x_.options());
#ifdef DDP_HAS_CUDA
    if (by_kernels_) {
      const auto counted = count_products();
      const auto parts =
          at::empty({detail::num_product_parts(shape()), t.numel()}, t.options().dtype(at::kFloat));
      C10_CUDA_CHECK(
          detail::launch_dropped_product(shape(), x_.const_data_ptr(), a.const_data_ptr(), draws_,
                                         parts.mutable_data_ptr<float>(), detail::stream_of(x_)));
      add_parts(parts, {t});
      return t;
    }
#endif
    for_each_layer([&](const at::Tensor& mask, const Slice& ranks) {
      columns(t, ranks).copy_(at::mm(dropped(x_, mask), rows(a, ranks).t()));
    });
    return t;
  }

  /// dropout'(u A), summed over the layers.
  at::Tensor sum(const at::Tensor& u, const at::Tensor& a) const {
    auto grad = at::empty(x_.sizes(), x_.options());
    if (adapters_.dropout_p == 0) {
      detail::gemm(grad, u, a);
      return grad;
    }
#ifdef DDP_HAS_CUDA
    if (by_kernels_) {
      const auto counted = count_products();
      C10_CUDA_CHECK(detail::launch_dropped_sum(shape(), u.const_data_ptr(), a.const_data_ptr(),
                                                draws_, grad.mutable_data_ptr(),
                                                detail::stream_of(x_)));
      return grad;
    }
#endif
    grad.zero_();
    for_each_layer([&](const at::Tensor& mask, const Slice& ranks) {
      grad.add_(dropped(at::mm(columns(u, ranks), rows(a, ranks)), mask));
    });
    return grad;
  }

  /// target = the gradient of A, uᵀ x'.
  void gradient(const at::Tensor& u, const detail::GradTarget& target) const {
    if (adapters_.dropout_p == 0) {
      detail::gemm_into(target, u.t(), x_);
      return;
    }
#ifdef DDP_HAS_CUDA
    if (by_kernels_) {
      const auto counted = count_products();
      const auto parts = at::empty({detail::num_gradient_parts(shape()), u.size(1) * x_.size(1)},
                                   x_.options().dtype(at::kFloat));
      C10_CUDA_CHECK(
          detail::launch_dropped_gradient(shape(), u.const_data_ptr(), x_.const_data_ptr(), draws_,
                                          parts.mutable_data_ptr<float>(), detail::stream_of(x_)));
      if (target.memory.is_contiguous()) {
        add_parts(parts, target);
      } else {  // as the strides of A
        target.write(parts.sum(0).view(target.memory.sizes()));
      }
      return;
    }
#endif
    for_each_layer([&](const at::Tensor& mask, const Slice& ranks) {
      detail::gemm_into(rows(target.memory, ranks), target.beta, columns(u, ranks).t(),
                        dropped(x_, mask));
    });
  }

 private:
  bool fits_kernels() const {
#ifdef DDP_HAS_CUDA
    return detail::runs_own_kernels(x_, x_.scalar_type()) && x_.numel() > 0 &&
           x_.size(1) % 64 == 0 && adapters_.rank % 8 == 0 &&
           detail::dropped_sum_bytes(shape()) <=
               static_cast<int64_t>(
                   at::cuda::getDeviceProperties(x_.device().index())->sharedMemPerBlockOptin);
#else
    return false;
#endif
  }
#ifdef DDP_HAS_CUDA
  /// Of one call of a kernel: rows by inputs by the ranks of all layers.
  detail::CountedOp count_products() const {
    return detail::CountedOp(
        detail::product_flops(x_.size(0), x_.size(1), adapters_.rank * adapters_.count()),
        x_.scalar_type());
  }
  static void add_parts(const at::Tensor& parts, const detail::GradTarget& target) {
    C10_CUDA_CHECK(detail::launch_add_parts(parts.const_data_ptr<float>(), parts.size(0),
                                            parts.size(1), detail::grad_out(target),
                                            detail::stream_of(parts)));
  }
  detail::LoraShape shape() const {
    return {.rows = x_.size(0),
            .in = x_.size(1),
            .rank = adapters_.rank,
            .layers = adapters_.count(),
            .element = detail::element_of(x_.scalar_type())};
  }
#endif
  at::Tensor dropped(const at::Tensor& values, const at::Tensor& mask) const {
    return at::native_dropout_backward(values, mask, 1 / (1 - adapters_.dropout_p));
  }
  template <typename Call>
  void for_each_layer(Call&& call) const {
    int64_t layer = 0;
    adapters_.for_each([&](const Slice&, const Slice& ranks) { call(stored_[layer++], ranks); });
  }

  const at::Tensor& x_;
  const Adapters& adapters_;
  bool by_kernels_;
  at::Tensor stored_;
#ifdef DDP_HAS_CUDA
  detail::DropoutDraws draws_;
#endif
};

/// With x' = dropout(x), t = x' Aᵀ:   y = x Wᵀ + b + residual + s t Bᵀ
///
///   u = s dy B   dB = s dyᵀ t   dA = uᵀ x'   dx = dy W + dropout'(u A)
///
/// The thin products run first, so that the wide ones add to their results in passing. A gated call
/// continues with swiglu(y).
class LoraLinear : public torch::autograd::Function<LoraLinear> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias,
                            const std::optional<at::Tensor>& residual, const at::Tensor& lora_a,
                            const at::Tensor& lora_b, const LoraLinearOptions& options) {
    const c10::DeviceGuard device(input.device());
    const AutocastOff no_autocast(input.device().type());
    const auto dtype = input.scalar_type();
    const Adapters adapters{.rank = lora_b.size(1),
                            .out_sizes = options.out_sizes,
                            .scale = options.scale,
                            .dropout_p = options.dropout_p};
    const auto x = detail::dense(as_rows(input));
    const auto a = detail::dense(lora_a.to(dtype)), b = lora_b.to(dtype);
    const DroppedInput dropped(x, adapters);
    const auto t = dropped.product(a);
    auto sizes = input.sizes().vec();
    sizes.back() = weight.size(0);
    const auto out = at::empty(sizes, x.options());
    const auto y = out.view({-1, weight.size(0)});
    if (!options.skips_result || options.gated) {  // the gated backward reads y
      compute(y, x, weight, b, t, residual, bias.value_or(at::Tensor()), adapters, options);
    }
    const auto fp8 = options.fp8.value_or(Fp8Weight{});
    ctx->save_for_backward({x, options.fp8 ? fp8.transposed_values : weight, lora_a, lora_b, t,
                            dropped.stored(), fp8.transposed_scales,
                            options.gated ? y : at::Tensor(), bias.value_or(at::Tensor())});
    ctx->saved_data["scale"] = options.scale;
    ctx->saved_data["dropout_p"] = options.dropout_p;
    ctx->saved_data["out_sizes"] = options.out_sizes;
    ctx->saved_data["input_sizes"] = input.sizes().vec();
    ctx->saved_data["adds"] = residual.has_value();
    ctx->set_materialize_grads(false);
    return options.gated ? detail::swiglu_forward(out) : out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    detail::check_differentiated_once("lora_linear");
    if (!grad_outputs[0].defined()) {
      return variable_list(7);
    }
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1], &lora_a = saved[2], &lora_b = saved[3],
               &t = saved[4], &stored = saved[5], &fp8_scales = saved[6], &gate_up = saved[7],
               &bias = saved[8];
    const c10::DeviceGuard device(x.device());
    const AutocastOff no_autocast(x.device().type());
    const auto dtype = x.scalar_type();
    const Adapters adapters{.rank = lora_b.size(1),
                            .out_sizes = ctx->saved_data["out_sizes"].toIntVector(),
                            .scale = ctx->saved_data["scale"].toDouble(),
                            .dropout_p = ctx->saved_data["dropout_p"].toDouble()};
    const DroppedInput dropped(x, adapters, stored);
    const auto grad_y = gradient_of_y(grad_outputs[0], gate_up, fp8_scales.defined());
    const auto& dy = grad_y.rows;
    const auto a = detail::dense(lora_a.to(dtype)), b = lora_b.to(dtype);
    const auto u = at::empty({x.size(0), a.size(0)}, x.options());
    const bool adds = ctx->saved_data["adds"].toBool();
    const auto [wants_input, wants_weight, wants_bias, wants_residual, wants_a, wants_b] =
        detail::wanted_gradients(ctx, {true, true, bias.defined(), adds, true, true});
    const auto grad_b = detail::grad_target(lora_b, wants_b);
    adapters.for_each([&](const Slice& outs, const Slice& ranks) {
      detail::gemm(columns(u, ranks), columns(dy, outs), rows(b, outs), {.alpha = adapters.scale});
      if (grad_b.memory.defined()) {
        detail::gemm_into(rows(grad_b.memory, outs), grad_b.beta, columns(dy, outs).t(),
                          columns(t, ranks), adapters.scale);
      }
    });
    const auto grad_a = detail::grad_target(lora_a, wants_a);
    if (grad_a.memory.defined()) {
      dropped.gradient(u, grad_a);
    }
    at::Tensor grad_input;
    if (wants_input) {
      const auto grad = dropped.sum(u, a);
      if (fp8_scales.defined()) {
        multiply_fp8(grad, grad_y.in_fp8, weight, fp8_scales, {});
      } else {
        detail::gemm(grad, dy, weight, {.beta = 1});
      }
      grad_input = grad.view(ctx->saved_data["input_sizes"].toIntVector());
    }
    return {grad_input,
            weight_gradient(weight, wants_weight, dy, x),
            bias_gradient(bias, wants_bias, dy),
            adds ? grad_outputs[0] : at::Tensor(),
            grad_a.result(),
            grad_b.result(),
            {}};
  }

 private:
  /// The gradient of y, also in FP8 if the wide product takes that.
  static detail::SwigluGradient gradient_of_y(const at::Tensor& grad_out, const at::Tensor& gate_up,
                                              bool in_fp8) {
    const auto grad = detail::dense(as_rows(grad_out));
    if (gate_up.defined() && in_fp8) {
      return detail::swiglu_backward_fp8(grad, gate_up);
    }
    const auto dy = gate_up.defined() ? detail::swiglu_backward(grad, gate_up) : grad;
    return {dy, in_fp8 ? detail::quantize_rows(dy) : detail::QuantizedRows{}};
  }
  // The base may be trained too.
  static at::Tensor weight_gradient(const at::Tensor& weight, bool wanted, const at::Tensor& dy,
                                    const at::Tensor& x) {
    const auto target = detail::grad_target(weight, wanted);
    if (target.memory.defined()) {
      detail::gemm_into(target, dy.t(), x);
    }
    return target.result();
  }
  static at::Tensor bias_gradient(const at::Tensor& bias, bool wanted, const at::Tensor& dy) {
    const auto target = detail::grad_target(bias, wanted);
    if (target.memory.defined()) {
      target.write(dy.sum(0, false, dy.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
    }
    return target.result();
  }

  /// y = x Wᵀ + bias + residual + scale t bᵀ
  static void compute(const at::Tensor& y, const at::Tensor& x, const at::Tensor& weight,
                      const at::Tensor& b, const at::Tensor& t,
                      const std::optional<at::Tensor>& residual, const at::Tensor& bias,
                      const Adapters& adapters, const LoraLinearOptions& options) {
    const auto skipped = residual ? as_rows(*residual).contiguous() : at::Tensor();
    adapters.for_each([&](const Slice& outs, const Slice& ranks) {
      detail::gemm(columns(y, outs), columns(t, ranks), rows(b, outs).t(),
                   {.alpha = adapters.scale,
                    .addend = skipped.defined() ? columns(skipped, outs) : at::Tensor()});
    });
    if (options.fp8) {
      multiply_fp8(y, detail::quantize_rows(x), options.fp8->values, options.fp8->scales, bias);
    } else {
      detail::gemm(y, x, weight.t(), {.beta = 1, .bias = bias});
    }
  }
  /// out += x weightᵀ + bias, where `scales` are of the weight's rows.
  static void multiply_fp8(const at::Tensor& out, const detail::QuantizedRows& x,
                           const at::Tensor& weight, const at::Tensor& scales,
                           const at::Tensor& bias) {
    detail::gemm(out, x.values, weight.t(),
                 {.beta = 1, .bias = bias, .a_scales = x.scales, .b_scales = scales});
  }
};

void check_shapes(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& lora_a,
                  const at::Tensor& lora_b, const LoraLinearOptions& options) {
  int64_t out = 0;
  for (const int64_t size : options.out_sizes) {
    out += size;
  }
  const auto layers = static_cast<int64_t>(options.out_sizes.size());
  TORCH_CHECK(weight.dim() == 2 && lora_a.dim() == 2 && lora_b.dim() == 2 && input.dim() > 0 &&
                  input.size(-1) == weight.size(1) && lora_a.size(1) == weight.size(1) &&
                  lora_b.size(0) == weight.size(0) && out == weight.size(0) &&
                  lora_a.size(0) == layers * lora_b.size(1),
              "lora_linear: input ", input.sizes(), ", weight ", weight.sizes(), ", A ",
              lora_a.sizes(), " and B ", lora_b.sizes(), " do not fit each other for ", layers,
              " layers of ", options.out_sizes, " outputs");
  const auto fits = [&](const at::Tensor& tensor, const char* name, at::IntArrayRef sizes) {
    if (tensor.defined()) {
      TORCH_CHECK(tensor.sizes() == sizes, "lora_linear: ", name, " ", tensor.sizes(), " is not ",
                  sizes);
      detail::check_same_device("lora_linear", input, name, tensor);
    }
  };
  auto result = input.sizes().vec();
  result.back() = out;
  detail::check_same_device("lora_linear", input, "weight", weight);
  detail::check_same_device("lora_linear", input, "A", lora_a);
  detail::check_same_device("lora_linear", input, "B", lora_b);
  fits(options.bias, "bias", {out});
  fits(options.residual, "residual", result);
  if (options.fp8) {
    TORCH_CHECK(!weight.requires_grad() || !at::GradMode::is_enabled(),
                "lora_linear: the weight requires a gradient, but its FP8 copy is multiplied and "
                "has none; freeze the weight, or do not convert it to FP8");
    const int64_t in = weight.size(1);
    fits(options.fp8->values, "fp8.values", {out, in});
    fits(options.fp8->scales, "fp8.scales", {out});
    fits(options.fp8->transposed_values, "fp8.transposed_values", {in, out});
    fits(options.fp8->transposed_scales, "fp8.transposed_scales", {in});
  }
  TORCH_CHECK(options.dropout_p >= 0 && options.dropout_p < 1,
              "lora_linear: dropout_p = ", options.dropout_p,
              ": it must be at least 0 and below 1");
  TORCH_CHECK(!options.gated || (weight.size(0) % 2 == 0 && !options.residual.defined()),
              "lora_linear: a gated call needs gate and up, two equal halves of its ",
              weight.size(0), " outputs, and no residual");
}

}  // namespace

at::Tensor lora_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& lora_a,
                       const at::Tensor& lora_b, LoraLinearOptions options) {
  if (options.out_sizes.empty()) {
    options.out_sizes = {weight.size(0)};
  }
  check_shapes(input, weight, lora_a, lora_b, options);
  const auto device = input.device().type();
  const auto cast = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !at::autocast::is_autocast_enabled(device)) {
      return tensor;
    }
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
  };
  const auto x = cast(input);
  // A residual of another dtype keeps it: the sum is then made by PyTorch.
  const auto& residual = options.residual;
  const bool adds = residual.defined() && residual.scalar_type() == x.scalar_type();
  const auto out = LoraLinear::apply(x, cast(weight), detail::optional_of(cast(options.bias)),
                                     detail::optional_of(adds ? residual : at::Tensor()), lora_a,
                                     lora_b, options);
  return residual.defined() && !adds ? residual + out : out;
}

}  // namespace ddp::ops
