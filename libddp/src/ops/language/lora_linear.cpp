// SPDX-License-Identifier: Apache-2.0
#include "ddp/ops/language.hpp"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "ops/autocast_off.hpp"
#include "ops/tensor_launch.hpp"

namespace ddp::ops {
namespace {

at::Tensor rows(const at::Tensor& tensor) {
  return tensor.reshape({-1, tensor.size(-1)});
}

/// With x' = dropout(x), t = x' Aᵀ:   y = x Wᵀ + b + s t Bᵀ
///
///   u = s dy B   dB = s dyᵀ t   dA = uᵀ x'   dx = dy W + dropout'(u A)
class LoraLinear : public torch::autograd::Function<LoraLinear> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const at::Tensor& lora_a, const at::Tensor& lora_b,
                            const LoraLinearOptions& options) {
    const AutocastOff no_autocast(input.device().type());
    const auto dtype = input.scalar_type();
    const auto b = lora_b.to(dtype);
    auto output = at::linear(input, weight, bias);
    at::Tensor mask;
    auto dropped = rows(input);
    if (options.dropout_p > 0) {
      std::tie(dropped, mask) = at::native_dropout(dropped, options.dropout_p, true);
    }
    const auto t = at::mm(dropped, lora_a.to(dtype).t());
    rows(output).addmm_(t, b.t(), 1, options.scale);
    ctx->save_for_backward({input, weight, lora_a, lora_b, t, mask});
    ctx->saved_data["scale"] = options.scale;
    ctx->saved_data["dropout_p"] = options.dropout_p;
    ctx->saved_data["needs_input"] = input.requires_grad();
    return output;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grad_outputs) {
    detail::check_differentiated_once("lora_linear");
    const auto saved = ctx->get_saved_variables();
    const auto &input = saved[0], &weight = saved[1], &t = saved[4], &mask = saved[5];
    const AutocastOff no_autocast(input.device().type());
    const auto dtype = input.scalar_type();
    const double scale = ctx->saved_data["scale"].toDouble();
    const double keep_scale = 1 / (1 - ctx->saved_data["dropout_p"].toDouble());
    const auto dy = rows(grad_outputs[0]);
    const auto a = saved[2].to(dtype);
    const auto b = saved[3].to(dtype);
    const auto u = at::mm(dy, b * scale);
    auto x = rows(input);
    if (mask.defined()) {
      x = at::native_dropout_backward(x, mask, keep_scale);
    }
    at::Tensor grad_input;
    if (ctx->saved_data["needs_input"].toBool()) {
      grad_input = at::mm(dy, weight);
      if (mask.defined()) {
        grad_input.add_(at::native_dropout_backward(at::mm(u, a), mask, keep_scale));
      } else {
        grad_input.addmm_(u, a);
      }
      grad_input = grad_input.view(input.sizes());
    }
    const auto grad_a = at::mm(u.t(), x).to(saved[2].scalar_type());
    const auto grad_b = at::mm(dy.t(), t).mul_(scale).to(saved[3].scalar_type());
    return {grad_input, {}, {}, grad_a, grad_b, {}};
  }
};

}  // namespace

at::Tensor lora_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                       const at::Tensor& lora_a, const at::Tensor& lora_b,
                       const LoraLinearOptions& options) {
  const auto device = input.device().type();
  std::optional<at::Tensor> maybe_bias;
  if (bias.defined()) {
    maybe_bias = bias;
  }
  if (!at::autocast::is_autocast_enabled(device)) {
    return LoraLinear::apply(input, weight, maybe_bias, lora_a, lora_b, options);
  }
  const auto dtype = at::autocast::get_autocast_dtype(device);
  return LoraLinear::apply(at::autocast::cached_cast(dtype, input, device),
                           at::autocast::cached_cast(dtype, weight, device),
                           at::autocast::cached_cast(dtype, maybe_bias, device), lora_a, lora_b,
                           options);
}

}  // namespace ddp::ops
