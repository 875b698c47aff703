// SPDX-License-Identifier: Apache-2.0
#include "ddp/ops/vision.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ops/gemm/gemm.hpp"
#include "ops/grad_target.hpp"
#include "ops/shared/autocast_off.hpp"
#include "ops/shared/flop_counter.hpp"
#include "ops/tensor_launch.hpp"
#ifdef DDP_HAS_CUDA
#include "ops/vision/pooled_linear_kernels.hpp"
#endif

namespace ddp::ops {
namespace {

#ifdef DDP_HAS_CUDA
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

detail::PooledShape shape_of(at::IntArrayRef x, const at::Tensor& weight, at::ScalarType dtype) {
  return {.batch = static_cast<int>(x[0]),
          .pixels = static_cast<int>(x[2] * x[3]),
          .channels = static_cast<int>(x[1]),
          .classes = static_cast<int>(weight.size(0)),
          .element = detail::element_of(dtype),
          .weights = detail::element_of(weight.scalar_type())};
}

bool is_fused(const detail::PooledShape& shape) {
  return shape.classes <= detail::kMaxFusedClasses;
}

at::Tensor empty_grad(const std::vector<int64_t>& sizes, const at::Tensor& like) {
  return at::empty(sizes, like.options(), at::MemoryFormat::ChannelsLast);
}

class PooledLinear : public torch::autograd::Function<PooledLinear> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x_in, const at::Tensor& weight,
                            const at::Tensor& bias, at::ScalarType dtype) {
    const c10::cuda::CUDAGuard device(x_in.device());
    const AutocastOff no_autocast(at::kCUDA);
    const auto x = x_in.to(dtype).contiguous(at::MemoryFormat::ChannelsLast);
    const auto shape = shape_of(x.sizes(), weight, dtype);
    const auto stream = detail::stream_of(x);
    const auto logits = at::empty({shape.batch, shape.classes},
                                  x.options().memory_format(at::MemoryFormat::Contiguous));
    const detail::CountedOp counted(
        detail::product_flops(shape.batch, shape.channels, shape.classes), dtype);
    at::Tensor pooled;
    if (is_fused(shape)) {
      pooled = at::empty({shape.batch, shape.channels}, x.options().dtype(at::kFloat));
      C10_CUDA_CHECK(detail::launch_pooled_linear(
          shape, x.const_data_ptr(), weight.const_data_ptr(), bias.const_data_ptr(),
          pooled.mutable_data_ptr<float>(), logits.mutable_data_ptr(), stream));
    } else {
      pooled = at::empty({shape.batch, shape.channels}, x.options());
      C10_CUDA_CHECK(
          detail::launch_pool(shape, x.const_data_ptr(), pooled.mutable_data_ptr(), stream));
      detail::gemm(logits, pooled, weight.to(dtype).t(), {.bias = bias.to(dtype)});
    }
    ctx->save_for_backward({pooled, weight, bias});
    ctx->saved_data["sizes"] = x.sizes().vec();
    ctx->saved_data["x_dtype"] = x_in.scalar_type();
    ctx->set_materialize_grads(false);
    return logits;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    detail::check_differentiated_once("pooled_linear");
    if (!grad_outputs[0].defined()) {
      return variable_list(4);
    }
    const auto saved = ctx->get_saved_variables();
    const auto &pooled = saved[0], &weight = saved[1], &bias = saved[2];
    const c10::cuda::CUDAGuard device(pooled.device());
    const AutocastOff no_autocast(at::kCUDA);
    const auto grad = grad_outputs[0].contiguous();
    const auto sizes = ctx->saved_data["sizes"].toIntVector();
    const auto shape = shape_of(sizes, weight, grad.scalar_type());
    const int num_gradients = int{ctx->needs_input_grad(0)} + int{ctx->needs_input_grad(1)};
    const detail::CountedOp counted(
        num_gradients * detail::product_flops(shape.batch, shape.channels, shape.classes),
        grad.scalar_type());
    at::Tensor grad_x;
    if (ctx->needs_input_grad(0)) {
      grad_x = empty_grad(sizes, grad);
    }
    const auto weight_target = detail::grad_target(weight, ctx->needs_input_grad(1));
    const auto bias_target = detail::grad_target(bias, ctx->needs_input_grad(2));
    if (is_fused(shape)) {
      C10_CUDA_CHECK(detail::launch_pooled_linear_backward(
          shape, grad.const_data_ptr(), weight.const_data_ptr(), pooled.const_data_ptr<float>(),
          grad_x.defined() ? grad_x.mutable_data_ptr() : nullptr, detail::grad_out(weight_target),
          detail::grad_out(bias_target), detail::stream_of(grad)));
    } else {
      backward_by_gemm(shape, grad, pooled, weight, grad_x, weight_target, bias_target);
    }
    if (grad_x.defined()) {
      grad_x = grad_x.to(ctx->saved_data["x_dtype"].toScalarType());
    }
    return {grad_x, weight_target.result(), bias_target.result(), at::Tensor()};
  }

 private:
  static void backward_by_gemm(const detail::PooledShape& shape, const at::Tensor& grad,
                               const at::Tensor& pooled, const at::Tensor& weight,
                               const at::Tensor& grad_x, const detail::GradTarget& weight_target,
                               const detail::GradTarget& bias_target) {
    if (weight_target.memory.defined()) {
      detail::gemm_into(weight_target, grad.t(), pooled);
    }
    if (bias_target.memory.defined()) {
      bias_target.write(at::sum(grad, 0, false, at::kFloat));
    }
    if (grad_x.defined()) {
      const auto grad_pooled = at::empty_like(pooled);
      detail::gemm(grad_pooled, grad, weight.to(grad.scalar_type()));
      C10_CUDA_CHECK(detail::launch_unpool(shape, grad_pooled.const_data_ptr(),
                                           grad_x.mutable_data_ptr(), detail::stream_of(grad)));
    }
  }
};
#endif

at::Tensor by_aten(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return at::linear(at::adaptive_avg_pool2d(x, {1, 1}).flatten(1), weight, bias);
}

}  // namespace

at::Tensor pooled_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  TORCH_CHECK(x.dim() == 4 && weight.dim() == 2 && bias.dim() == 1 && x.size(1) == weight.size(1) &&
                  bias.size(0) == weight.size(0),
              "pooled_linear: x [batch, channels, height, width], weight [classes, channels] and "
              "bias [classes] are needed, not ",
              x.sizes(), ", ", weight.sizes(), " and ", bias.sizes());
  detail::check_same_device("pooled_linear", x, "weight", weight);
  detail::check_same_device("pooled_linear", x, "bias", bias);
#ifdef DDP_HAS_CUDA
  const auto dtype = detail::compute_dtype(x, x.scalar_type());
  if (detail::runs_own_kernels(x, dtype) && x.size(1) % 8 == 0 && x.numel() > 0 &&
      weight.is_contiguous() && bias.is_contiguous() && detail::is_aligned(weight) &&
      detail::is_aligned(x) && weight.scalar_type() == bias.scalar_type() &&
      weight.scalar_type() != at::kDouble) {
    return PooledLinear::apply(x, weight, bias, dtype);
  }
#endif
  return by_aten(x, weight, bias);
}

}  // namespace ddp::ops
