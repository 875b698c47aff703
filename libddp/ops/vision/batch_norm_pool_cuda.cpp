// SPDX-License-Identifier: Apache-2.0
// max_pool2d(relu(bn(x))) of a stem on a GPU.
#include <torch/csrc/autograd/custom_function.h>

#include "ops/tensor_launch.hpp"
#include "ops/vision/batch_norm_call.hpp"
#include "ops/vision/batch_norm_fused.hpp"

namespace ddp::ops::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

PoolShape pool_shape(const at::Tensor& x) {
  PoolShape shape;
  shape.batch = static_cast<int>(x.size(0));
  shape.height = static_cast<int>(x.size(2));
  shape.width = static_cast<int>(x.size(3));
  shape.pooled_height = (shape.height + 1) / 2;
  shape.pooled_width = (shape.width + 1) / 2;
  return shape;
}

BatchNormGrid grid_of(const KernelScope& kernels, const PoolShape& shape, const at::Tensor& x) {
  const int64_t rows = int64_t{1} * shape.batch * shape.pooled_height * shape.pooled_width;
  return sums_grid(rows, x.size(1), kernels.num_sms());
}

struct PoolResults {
  at::Tensor y, index, statistics;
};

PoolResults run_pool_forward(const at::Tensor& x, const BatchNormLayer& bn, bool keep) {
  const KernelScope kernels(x);
  PoolResults results;
  PoolForwardCall call;
  call.shape = pool_shape(x);
  call.grid = grid_of(kernels, call.shape, x);
  call.x = x.const_data_ptr();
  const auto weight = aligned(bn.weight), bias = aligned(bn.bias);  // until the launch
  if (bn.training && bn.exchange) {
    results.statistics = compute_shared_statistics(kernels, x, bn, {}, nullptr)[0];
    call.bn = affine_of(results.statistics, weight, bias);
  } else if (bn.training) {
    results.statistics = compute_statistics(kernels, x, bn);
    call.bn = affine_of(results.statistics, bn.weight, bn.bias);
  } else {
    call.bn = evaluation_affine(bn);
  }
  results.y = at::empty({x.size(0), x.size(1), call.shape.pooled_height, call.shape.pooled_width},
                        x.options().requires_grad(false), at::MemoryFormat::ChannelsLast);
  call.y = results.y.mutable_data_ptr();
  if (keep) {
    results.index =
        at::empty({results.y.numel()}, x.options().dtype(at::kByte).requires_grad(false));
    call.index = results.index.mutable_data_ptr<uint8_t>();
  }
  if (x.numel() > 0) {
    kernels(launch_pool_forward, call);
  }
  return results;
}

class BatchNormReluMaxPool : public torch::autograd::Function<BatchNormReluMaxPool> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                               const at::Tensor& bias, const BatchNormLayer* bn) {
    const auto results = run_pool_forward(x, *bn, /*keep=*/true);
    ctx->save_for_backward(
        {x, weight, bias, results.index, results.statistics, bn->kernel_counters});
    keep_exchange(ctx, bn->exchange);
    ctx->set_materialize_grads(false);
    return {results.y, second_handle(results.y)};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_differentiated_once("batch_norm_relu_max_pool");
    const auto saved = ctx->get_saved_variables();
    if (!grads[0].defined() && !grads[1].defined()) {
      if (kept_exchange(ctx) == nullptr) {
        return variable_list(4);
      }
      const auto pooled = pool_shape(saved[0]);  // the other ranks wait for this one
      grads[0] =
          at::zeros({saved[0].size(0), saved[0].size(1), pooled.pooled_height, pooled.pooled_width},
                    saved[0].options().memory_format(at::MemoryFormat::ChannelsLast));
    }
    BackwardNorm norm(saved[0], saved[1], saved[2], saved[4], wanted_pair(ctx, 1));
    const auto dtype = norm.x.scalar_type();
    const auto grad = in_kernel_layout(grads[0].defined() ? grads[0] : grads[1], dtype);
    const auto grad2 = grads[0].defined() ? in_kernel_layout(grads[1], dtype) : at::Tensor();
    const KernelScope kernels(norm.x);
    PoolBackwardCall call;
    call.shape = pool_shape(norm.x);
    call.grid = grid_of(kernels, call.shape, norm.x);
    const Scratch scratch(call.grid, 2, saved[5], norm.weight);
    call.scratch = scratch.pointers();
    call.grad = grad.const_data_ptr();
    call.grad2 = pointer(grad2);
    call.index = saved[3].const_data_ptr<uint8_t>();
    call.target = norm.target();
    const SharedSums shared(kept_exchange(ctx), norm.statistics, call.target, nullptr);
    if (norm.x.numel() == 0) {  // joins the collective with empty input
      norm.grad_weight.write_zeros();
      norm.grad_bias.write_zeros();
      shared.write_zeros();
      shared.finish(kernels, call.target, nullptr);
    } else {
      kernels(launch_pool_backward, call);
      shared.finish(kernels, call.target, nullptr);
      call.apply = true;
      kernels(launch_pool_backward, call);
    }
    return {norm.grad_x, norm.grad_weight.result(), norm.grad_bias.result(), at::Tensor()};
  }
};

}  // namespace

Fork fused_batch_norm_relu_max_pool(const at::Tensor& x_in, const BatchNormLayer& bn) {
  const auto x = in_kernel_layout(x_in, x_in.scalar_type());
  if (!needs_grad({x, bn.weight, bn.bias})) {
    const auto y = run_pool_forward(x, bn, /*keep=*/false).y;
    return {y, y};
  }
  const auto outputs = BatchNormReluMaxPool::apply(x, bn.weight, bn.bias, &bn);
  return {outputs[0], outputs[1]};
}

}  // namespace ddp::ops::detail
