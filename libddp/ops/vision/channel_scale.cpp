// SPDX-License-Identifier: Apache-2.0
#include "ops/vision/channel_scale.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ops/tensor_launch.hpp"
#ifdef DDP_HAS_CUDA
#include "ops/vision/channel_scale_kernels.hpp"
#endif

namespace ddp::ops::detail {

#ifdef DDP_HAS_CUDA
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

ChannelShape shape_of(at::IntArrayRef x, at::ScalarType dtype) {
  return {.batch = static_cast<int>(x[0]),
          .pixels = static_cast<int>(x[2] * x[3]),
          .channels = static_cast<int>(x[1]),
          .element = element_of(dtype)};
}

float share_of_pixel(const ChannelShape& shape) {
  return 1.0F / static_cast<float>(shape.pixels);
}

at::Tensor sums_over_pixels(const at::Tensor& a, const at::Tensor& b, bool means) {
  const auto shape = shape_of(a.sizes(), a.scalar_type());
  const auto sums =
      at::empty({a.size(0), a.size(1), 1, 1}, a.options(), at::MemoryFormat::ChannelsLast);
  C10_CUDA_CHECK(launch_channel_sums(shape, a.const_data_ptr(), data_or_null(b),
                                     means ? share_of_pixel(shape) : 1.0F, sums.mutable_data_ptr(),
                                     stream_of(a)));
  return sums;
}

at::Tensor in_layout_of_images(const at::Tensor& grad) {
  return grad.defined() ? aligned(grad.resolve_neg().contiguous(at::MemoryFormat::ChannelsLast))
                        : grad;
}

// Three outputs: means, x and the scale's slot. The slot's gradient is not a gradient but the scale
// itself, sent by ScaleChannels. Then the gradient of the second output lacks the factor scale.
// Autograd carries both, so nothing outlives a backward, and a retained graph can run again.
class ChannelMeansFunction : public torch::autograd::Function<ChannelMeansFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x) {
    const c10::cuda::CUDAGuard device(x.device());
    const auto means = sums_over_pixels(x, {}, /*means=*/true);
    ctx->saved_data["sizes"] = x.sizes().vec();
    ctx->set_materialize_grads(false);
    return {means, alias_of(x), alias_of(means)};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_differentiated_once("channel_means");
    const auto &grad_means = grads[0], &grad_x = grads[1], &scale = grads[2];
    if (!grad_means.defined() && !grad_x.defined()) {
      return variable_list(1);
    }
    const auto& any = grad_x.defined() ? grad_x : grad_means;
    const c10::cuda::CUDAGuard device(any.device());
    const auto grad = in_layout_of_images(grad_x);
    const auto addend = grad_means.defined() ? dense(grad_means.resolve_neg()) : grad_means;
    const auto factor = scale.defined() ? dense(scale) : scale;
    const auto sizes = ctx->saved_data["sizes"].toIntVector();
    const auto shape = shape_of(sizes, any.scalar_type());
    const auto sum = at::empty(sizes, any.options(), at::MemoryFormat::ChannelsLast);
    C10_CUDA_CHECK(launch_channel_scale(shape, data_or_null(grad), data_or_null(factor),
                                        data_or_null(addend), share_of_pixel(shape),
                                        sum.mutable_data_ptr(), stream_of(sum)));
    return {sum};
  }
};

class ScaleChannels : public torch::autograd::Function<ScaleChannels> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& scale,
                            const at::Tensor& /*scale_slot*/) {
    const c10::cuda::CUDAGuard device(x.device());
    const auto y = at::empty_like(x);
    C10_CUDA_CHECK(launch_channel_scale(shape_of(x.sizes(), x.scalar_type()), x.const_data_ptr(),
                                        scale.const_data_ptr(), nullptr, 0, y.mutable_data_ptr(),
                                        stream_of(x)));
    ctx->save_for_backward({x, scale});
    ctx->set_materialize_grads(false);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_differentiated_once("scale_channels");
    if (!grads[0].defined()) {
      return variable_list(3);
    }
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &scale = saved[1];
    const c10::cuda::CUDAGuard device(x.device());
    const auto grad = in_layout_of_images(grads[0]);
    variable_list results(3);
    if (ctx->needs_input_grad(1)) {
      results[1] = sums_over_pixels(grad, x, /*means=*/false);
    }
    if (ctx->needs_input_grad(0)) {
      results[0] = grad;
      results[2] = scale.detach();
    }
    return results;
  }
};

// Each sample is one row of pixels with eight channels.
at::Tensor scaled_samples(const at::Tensor& x, const at::Tensor& scale) {
  const c10::cuda::CUDAGuard device(x.device());
  const ChannelShape shape = {.batch = static_cast<int>(x.size(0)),
                              .pixels = static_cast<int>(x.numel() / x.size(0) / 8),
                              .channels = 8,
                              .element = element_of(x.scalar_type())};
  const auto scales = scale.reshape({-1, 1}).expand({-1, 8}).contiguous();
  const auto y = at::empty_strided(x.sizes(), x.strides(), x.options());
  C10_CUDA_CHECK(launch_channel_scale(shape, x.const_data_ptr(), scales.const_data_ptr(), nullptr,
                                      0, y.mutable_data_ptr(), stream_of(x)));
  return y;
}

class ScaleSamples : public torch::autograd::Function<ScaleSamples> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& scale) {
    ctx->save_for_backward({scale});
    ctx->saved_data["strides"] = x.strides().vec();
    return scaled_samples(x, scale);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_differentiated_once("scale_samples");
    const auto strides = ctx->saved_data["strides"].toIntVector();
    auto grad = grads[0];
    if (grad.strides() != at::IntArrayRef(strides) || !is_aligned(grad) || grad.is_neg()) {
      grad = at::empty_strided(grad.sizes(), strides, grad.options()).copy_(grad);
    }
    return {scaled_samples(grad, ctx->get_saved_variables()[0]), at::Tensor()};
  }
};

bool fits_sample_kernel(const at::Tensor& x, const at::Tensor& scale) {
  constexpr int64_t kMaxVectors = int64_t{1} << 30;  // of 8 values
  return runs_own_float_kernels(x) && x.dim() > 1 && x.numel() > 0 &&
         x.numel() / x.size(0) % 8 == 0 && x.numel() / 8 < kMaxVectors &&
         x.is_non_overlapping_and_dense() && x.stride(0) == x.numel() / x.size(0) &&
         is_aligned(x) && !x.is_neg() && !scale.is_neg() && scale.dim() == x.dim() &&
         scale.size(0) == x.size(0) && scale.numel() == x.size(0) &&
         scale.scalar_type() == x.scalar_type() && scale.device() == x.device() &&
         !scale.requires_grad();
}

}  // namespace

at::Tensor scale_samples(const at::Tensor& x, const at::Tensor& scale) {
  return fits_sample_kernel(x, scale) ? ScaleSamples::apply(x, scale) : x * scale;
}

bool fits_channel_kernels(const at::Tensor& x) {
  constexpr int64_t kMaxVectors = int64_t{1} << 30;  // of 8 channels
  return runs_own_float_kernels(x) && x.dim() == 4 && x.numel() > 0 && x.size(1) % 8 == 0 &&
         x.numel() / 8 < kMaxVectors && x.is_contiguous(at::MemoryFormat::ChannelsLast) &&
         is_aligned(x) && !x.is_neg();
}

ChannelMeans channel_means(const at::Tensor& x) {
  if (!fits_channel_kernels(x)) {
    return {at::adaptive_avg_pool2d(x, {1, 1}), x, {}};
  }
  const auto made = ChannelMeansFunction::apply(x);
  return {made[0], made[1], made[2]};
}

at::Tensor scale_channels(const ChannelMeans& of, const at::Tensor& scale) {
  const auto& slot = of.scale_slot;
  // Else autograd of ATen's op finishes the gradient of of.x, and the slot gets none.
  const bool fits = slot.defined() && scale.sizes() == slot.sizes() &&
                    scale.scalar_type() == slot.scalar_type() && scale.device() == slot.device() &&
                    scale.is_contiguous() && is_aligned(scale) && !scale.is_neg();
  return fits ? ScaleChannels::apply(of.x, scale, slot) : of.x * scale;
}

#else

at::Tensor scale_samples(const at::Tensor& x, const at::Tensor& scale) {
  return x * scale;
}

bool fits_channel_kernels(const at::Tensor&) {
  return false;
}

ChannelMeans channel_means(const at::Tensor& x) {
  return {at::adaptive_avg_pool2d(x, {1, 1}), x, {}};
}

at::Tensor scale_channels(const ChannelMeans& of, const at::Tensor& scale) {
  return of.x * scale;
}

#endif

}  // namespace ddp::ops::detail
