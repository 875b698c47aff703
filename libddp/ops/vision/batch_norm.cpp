// SPDX-License-Identifier: Apache-2.0
#include "ddp/ops/vision.hpp"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <utility>

#include "ddp/detail/fusable_norm.hpp"
#include "ops/shared/private_stream.hpp"
#include "ops/shared/statistics_exchange.hpp"
#include "ops/streams/stream_order.hpp"
#include "ops/tensor_launch.hpp"
#include "ops/vision/batch_norm_fused.hpp"
#include "ops/vision/batch_norm_sync.hpp"

namespace ddp::ops {
namespace {

at::Tensor normalised(const at::Tensor& x, const BatchNormLayer& bn) {
  if (bn.training && bn.exchange) {
    return detail::shared_batch_norm(x, bn);
  }
  // cuDNN does not check addresses and reads several values at once: misaligned tensors would crash
  // the process.
  const auto aligned = [](const at::Tensor& t) {
    return t.defined() && t.is_cuda() && !detail::is_aligned(t) ? t.clone() : t;
  };
  const auto mean = aligned(bn.running_mean), var = aligned(bn.running_var);
  const auto y =
      at::batch_norm(aligned(x), aligned(bn.weight), aligned(bn.bias), mean, var, bn.training,
                     bn.momentum, bn.eps, at::globalContext().userEnabledCuDNN());
  for (const auto& [moved, estimate] : {std::pair{mean, bn.running_mean}, {var, bn.running_var}}) {
    if (bn.training && !moved.is_same(estimate)) {
      const at::NoGradGuard no_grad;
      estimate.copy_(moved);
    }
  }
  return y;
}

// Reports a user's mistake before computation or communication.
void check(const at::Tensor& x, const BatchNormLayer& bn) {
  if (bn.exchange) {
    bn.exchange->check_input(x, bn.weight.numel(), bn.training);
    return;
  }
  // The unbiased variance of one value divides by zero.
  const bool has_one_value = x.dim() > 1 && x.size(1) > 0 && x.numel() == x.size(1);
  TORCH_CHECK(!bn.training || !has_one_value,
              "batch_norm: Expected more than 1 value per channel when training, got input size ",
              x.sizes(), "; fix: use a larger batch or larger images, or evaluate the layer");
}

const void* group_of(const BatchNormLayer& bn) {
  return bn.exchange ? bn.exchange->group() : nullptr;
}

// Without a ReLU the kernels do not exchange statistics.
bool fits_without_relu(const at::Tensor& x, const BatchNormLayer& bn) {
  return !(bn.training && bn.exchange) && detail::fits_kernels(x, bn);
}

Fork both(const at::Tensor& tensor) {
  return {tensor, tensor};
}

}  // namespace

at::Tensor batch_norm_kernel_counters(const at::Tensor& weight) {
  if (detail::is_captured(detail::current_stream(weight.device()))) {
    return {};
  }
  const c10::InferenceMode normal(false);  // a backward may read them later
  return at::zeros({2 * weight.numel()}, weight.options().dtype(at::kInt).requires_grad(false));
}

at::Tensor batch_norm(const at::Tensor& x, const BatchNormLayer& bn) {
  check(x, bn);
  return fits_without_relu(x, bn) ? detail::fused_batch_norm(x, bn) : normalised(x, bn);
}

at::Tensor batch_norm_silu(const at::Tensor& x, const BatchNormLayer& bn) {
  check(x, bn);
  return fits_without_relu(x, bn) ? detail::fused_batch_norm_silu(x, bn)
                                  : at::silu(normalised(x, bn));
}

at::Tensor batch_norm_relu(const at::Tensor& x, const BatchNormLayer& bn) {
  check(x, bn);
  if (detail::fits_kernels(x, bn)) {
    return detail::fused_batch_norm_relu(x, bn).branch;
  }
  return normalised(x, bn).relu_();
}

Fork batch_norm_relu_fork(const at::Tensor& x, const BatchNormLayer& bn) {
  check(x, bn);
  return detail::fits_kernels(x, bn) ? detail::fused_batch_norm_relu(x, bn)
                                     : both(normalised(x, bn).relu_());
}

Fork batch_norm_add_relu(const at::Tensor& x, const BatchNormLayer& bn,
                         const at::Tensor& residual) {
  check(x, bn);
  if (detail::fits_kernels(x, bn) && detail::fits_addend(residual, x, bn)) {
    return detail::fused_batch_norm_add_relu(x, bn, residual, nullptr);
  }
  auto out = normalised(x, bn);
  out += residual;
  return both(out.relu_());
}

Fork batch_norm_add_relu(const at::Tensor& x, const BatchNormLayer& bn, const at::Tensor& z,
                         const BatchNormLayer& bn_z) {
  check(x, bn);
  check(z, bn_z);
  if (detail::fits_kernels(x, bn) && detail::fits_kernels(z, bn_z) &&
      detail::fits_addend(z, x, bn) && bn.training == bn_z.training &&
      group_of(bn) == group_of(bn_z)) {
    return detail::fused_batch_norm_add_relu(x, bn, z, &bn_z);
  }
  auto out = normalised(x, bn);
  out += normalised(z, bn_z);
  return both(out.relu_());
}

Fork batch_norm_relu_max_pool(const at::Tensor& x, const BatchNormLayer& bn) {
  check(x, bn);
  if (detail::fits_kernels(x, bn)) {
    return detail::fused_batch_norm_relu_max_pool(x, bn);
  }
  return both(at::max_pool2d(normalised(x, bn).relu_(), 3, 2, 1));
}

}  // namespace ddp::ops
