// SPDX-License-Identifier: Apache-2.0
// bn(x), silu(bn(x)), relu(bn(x)), relu(bn(x) + residual) and relu(bn(x) + bn2(z)) on a GPU.
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ops/shared/statistics_exchange.hpp"
#include "ops/tensor_launch.hpp"
#include "ops/vision/batch_norm_call.hpp"
#include "ops/vision/batch_norm_fused.hpp"

namespace ddp::ops::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool is_channel_vector(const at::Tensor& vector, const at::Tensor& x, bool any_address) {
  return vector.defined() && vector.scalar_type() == at::kFloat && vector.is_contiguous() &&
         vector.numel() == x.size(1) && vector.device() == x.device() &&
         (any_address || is_aligned(vector));
}

/// Results of a forward; undefined if not needed later.
struct Results {
  at::Tensor y, mask, statistics, statistics2;
};

at::Tensor empty_mask(const at::Tensor& x) {
  return at::empty({x.numel() / 8}, x.options().dtype(at::kByte).requires_grad(false));
}

// Statistics and result in one kernel. False: the activation is too large.
bool run_small_forward(const KernelScope& kernels, const at::Tensor& x, const BatchNormLayer& bn,
                       const at::Tensor& addend, const BatchNormLayer* bn2, ApplyCall apply,
                       Results& results) {
  SmallForwardCall call;
  call.small = kernels.small_grid(x, addend.defined() ? 2 : 1);
  if (call.small.rows_of_thread == 0) {
    return false;
  }
  results.statistics = empty_statistics(bn.weight);
  call.first = statistics_call(x, bn, results.statistics);
  apply.bn = affine_of(results.statistics, bn.weight, bn.bias);
  if (bn2 != nullptr) {
    results.statistics2 = empty_statistics(bn2->weight);
    call.second = statistics_call(addend, *bn2, results.statistics2);
    apply.bn2 = affine_of(results.statistics2, bn2->weight, bn2->bias);
  }
  const Scratch scratch(call.small.grid, bn2 != nullptr ? 4 : 2, bn.kernel_counters, bn.weight);
  call.first.scratch = scratch.pointers();
  call.apply = apply;
  kernels(launch_small_forward, call);
  return true;
}

Results run_forward(const at::Tensor& x, const BatchNormLayer& bn, const at::Tensor& addend,
                    const BatchNormLayer* bn2, bool keep,
                    Activation activation = Activation::Relu) {
  const KernelScope kernels(x);
  Results results;
  results.y = at::empty_like(x);
  ApplyCall call;
  call.x = x.const_data_ptr();
  call.addend = pointer(addend);
  call.second = bn2 != nullptr;
  call.y = results.y.mutable_data_ptr();
  call.activation = activation;
  const bool is_relu = activation == Activation::Relu;
  if (keep && is_relu) {
    results.mask = empty_mask(x);
    call.mask = results.mask.mutable_data_ptr<uint8_t>();
  }
  const bool shared = bn.training && bn.exchange;
  // With an exchange these tensors may be unaligned. Copies live until the launch.
  const auto weight = aligned(bn.weight), bias = aligned(bn.bias);
  const auto weight2 = bn2 != nullptr ? aligned(bn2->weight) : at::Tensor();
  const auto bias2 = bn2 != nullptr ? aligned(bn2->bias) : at::Tensor();
  if (is_relu && bn.training && !shared &&
      run_small_forward(kernels, x, bn, addend, bn2, call, results)) {
    return results;
  }
  if (shared) {
    const auto both = compute_shared_statistics(kernels, x, bn, addend, bn2);
    results.statistics = both[0], results.statistics2 = both[1];
    call.bn = affine_of(results.statistics, weight, bias);
    call.bn2 = bn2 != nullptr ? affine_of(results.statistics2, weight2, bias2) : Affine{};
  } else if (bn.training) {
    results.statistics = compute_statistics(kernels, x, bn);
    call.bn = affine_of(results.statistics, bn.weight, bn.bias);
    if (bn2 != nullptr) {
      results.statistics2 = compute_statistics(kernels, addend, *bn2);
      call.bn2 = affine_of(results.statistics2, bn2->weight, bn2->bias);
    }
  } else {
    call.bn = evaluation_affine(bn);
    call.bn2 = bn2 != nullptr ? evaluation_affine(*bn2) : Affine{};
  }
  if (x.numel() > 0) {
    call.grid = kernels.map_grid(x);
    call.follows_sums = bn.training && !shared && kernels.is_hopper();
    kernels(launch_apply, call);
  }
  return results;
}

void write_zeros(const BackwardNorm& first, const BackwardNorm* second) {
  for (const auto* norm : {&first, second}) {
    if (norm != nullptr) {
      norm->grad_weight.write_zeros();
      norm->grad_bias.write_zeros();
    }
  }
}

/// The backward of all forms: gradients of x and its parameters; with `second` also of z. Returns
/// d, the sum of both gradients under the ReLU mask, if `wants_sum` (for a residual) or if a second
/// kernel reads d. Without a mask there is one gradient, of SiLU's result if `silu_bias` is given.
at::Tensor run_backward(BackwardNorm& first, BackwardNorm* second, const at::Tensor& mask,
                        const at::Tensor& kernel_counters, const at::Tensor& grad,
                        const at::Tensor& grad2, bool wants_sum, StatisticsExchange* exchange,
                        const at::Tensor& silu_bias = {}) {
  const KernelScope kernels(first.x);
  const auto small = exchange == nullptr && mask.defined()
                         ? kernels.small_grid(first.x, second != nullptr ? 3 : 2)
                         : SmallGrid{};
  const bool is_small = small.rows_of_thread > 0;
  const auto sum =
      wants_sum || (grad2.defined() && !is_small) ? at::empty_like(grad) : at::Tensor();
  BackwardReduceCall reduce;
  reduce.grad = grad.const_data_ptr();
  reduce.grad2 = pointer(grad2);
  reduce.mask = static_cast<const uint8_t*>(pointer(mask));
  reduce.sum = sum.defined() ? sum.mutable_data_ptr() : nullptr;
  reduce.first = first.target();
  reduce.second_used = second != nullptr;
  reduce.second = second != nullptr ? second->target() : BackwardTarget{};
  reduce.silu_bias = static_cast<const float*>(pointer(silu_bias));

  auto* const second_target = second != nullptr ? &reduce.second : nullptr;
  const SharedSums shared(exchange, first.statistics, reduce.first, second_target);
  if (first.x.numel() == 0) {  // joins the collective with empty input
    write_zeros(first, second);
    shared.write_zeros();
    shared.finish(kernels, reduce.first, second_target);
    return sum;
  }
  reduce.grid = is_small ? small.grid : kernels.sums_grid(first.x);
  const Scratch scratch(reduce.grid, second != nullptr ? 3 : 2, kernel_counters, first.weight);
  reduce.scratch = scratch.pointers();
  if (is_small) {
    kernels(launch_small_backward, SmallBackwardCall{small, reduce});
    return sum;
  }
  kernels(launch_backward_reduce, reduce);
  shared.finish(kernels, reduce.first, second_target);

  BackwardApplyCall apply;
  apply.grid = kernels.map_grid(first.x);
  apply.grad = sum.defined() ? sum.const_data_ptr() : reduce.grad;
  apply.mask = sum.defined() ? nullptr : reduce.mask;
  apply.first = reduce.first;
  apply.second_used = reduce.second_used;
  apply.second = reduce.second;
  apply.follows_sums = exchange == nullptr && kernels.is_hopper();
  apply.silu_bias = reduce.silu_bias;
  kernels(launch_backward_apply, apply);
  return sum;
}

/// Gradients of one activation from its one or two consumers.
struct ForkGradients {
  at::Tensor first, second;

  /// Of a result like `x`. Without any gradient `first` is undefined, but zeros with an exchange:
  /// the other ranks wait for this one.
  ForkGradients(const variable_list& grads, const at::Tensor& x, bool is_exchanged)
      : first(in_kernel_layout(grads[0].defined() ? grads[0] : grads[1], x.scalar_type())),
        second(grads[0].defined() ? in_kernel_layout(grads[1], x.scalar_type()) : at::Tensor()) {
    if (!first.defined() && is_exchanged) {
      first = at::zeros_like(x);
    }
  }
};

// Two outputs: handles for branch and shortcut. Only ReLU's backward takes both gradients.
class BatchNormActivation : public torch::autograd::Function<BatchNormActivation> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                               const at::Tensor& bias, const BatchNormLayer* bn,
                               Activation activation) {
    const auto results = run_forward(x, *bn, {}, nullptr, /*keep=*/true, activation);
    const auto silu_bias = activation == Activation::Silu ? bias : at::Tensor();
    ctx->save_for_backward(
        {x, weight, bias, results.mask, results.statistics, bn->kernel_counters, silu_bias});
    keep_exchange(ctx, bn->exchange);
    ctx->set_materialize_grads(false);
    return {results.y, second_handle(results.y)};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto &mask = saved[3], &silu_bias = saved[6];
    check_differentiated_once(mask.defined()        ? "batch_norm_relu"
                              : silu_bias.defined() ? "batch_norm_silu"
                                                    : "batch_norm");
    auto* const exchange = kept_exchange(ctx);
    const ForkGradients grad(grads, saved[0], exchange != nullptr);
    if (!grad.first.defined()) {
      return variable_list(5);
    }
    BackwardNorm norm(saved[0], saved[1], saved[2], saved[4], wanted_pair(ctx, 1));
    run_backward(norm, nullptr, mask, saved[5], grad.first, grad.second, /*wants_sum=*/false,
                 exchange, silu_bias);
    return {norm.grad_x, norm.grad_weight.result(), norm.grad_bias.result(), at::Tensor(),
            at::Tensor()};
  }
};

class BatchNormAddRelu : public torch::autograd::Function<BatchNormAddRelu> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                               const at::Tensor& bias, const at::Tensor& addend,
                               const std::optional<at::Tensor>& weight2,
                               const std::optional<at::Tensor>& bias2, const BatchNormLayer* bn,
                               const BatchNormLayer* bn2) {
    const auto results = run_forward(x, *bn, addend, bn2, /*keep=*/true);
    // The backward does not need the residual.
    ctx->save_for_backward({x, weight, bias, results.mask, results.statistics, bn->kernel_counters,
                            bn2 != nullptr ? addend : at::Tensor(), weight2.value_or(at::Tensor()),
                            bias2.value_or(at::Tensor()), results.statistics2});
    keep_exchange(ctx, bn->exchange);
    ctx->set_materialize_grads(false);
    return {results.y, second_handle(results.y)};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_differentiated_once("batch_norm_add_relu");
    const auto saved = ctx->get_saved_variables();
    const auto& z = saved[6];
    auto* const exchange = kept_exchange(ctx);
    const auto [grad, grad2] = ForkGradients(grads, saved[0], exchange != nullptr);
    if (!grad.defined()) {
      return variable_list(8);
    }
    BackwardNorm first(saved[0], saved[1], saved[2], saved[4], wanted_pair(ctx, 1));
    if (z.defined()) {
      BackwardNorm second(z, saved[7], saved[8], saved[9], wanted_pair(ctx, 4));
      run_backward(first, &second, saved[3], saved[5], grad, grad2, /*wants_sum=*/false, exchange);
      return {first.grad_x,
              first.grad_weight.result(),
              first.grad_bias.result(),
              second.grad_x,
              second.grad_weight.result(),
              second.grad_bias.result(),
              at::Tensor(),
              at::Tensor()};
    }
    const auto sum = run_backward(first, nullptr, saved[3], saved[5], grad, grad2,
                                  /*wants_sum=*/true, exchange);
    return {first.grad_x,
            first.grad_weight.result(),
            first.grad_bias.result(),
            sum,
            at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

}  // namespace

namespace {

// A tensor that only starts at an unaligned address is copied.
bool is_channels_last(const at::Tensor& x) {
  return x.is_contiguous(at::MemoryFormat::ChannelsLast);
}

bool is_shared(const BatchNormLayer& bn) {
  return bn.training && bn.exchange;
}

Fork fused_activation(const at::Tensor& x_in, const BatchNormLayer& bn, Activation activation) {
  const auto x = in_kernel_layout(x_in, x_in.scalar_type());
  if (!needs_grad({x, bn.weight, bn.bias})) {
    const auto y = run_forward(x, bn, {}, nullptr, /*keep=*/false, activation).y;
    return {y, y};
  }
  const auto outputs = BatchNormActivation::apply(x, bn.weight, bn.bias, &bn, activation);
  return {outputs[0], outputs[1]};
}

}  // namespace

bool fits_kernels(const at::Tensor& x, const BatchNormLayer& bn) {
  const bool evaluation_with_grad =
      !bn.training && needs_grad({x, bn.weight, bn.bias});  // through the running estimates
  constexpr int64_t kMaxVectors = int64_t{1} << 30;  // of 8 elements; kernels count in 32 bits
  // Exchanging processes must all take the same path, so per-process differences must not decide.
  const bool shared = is_shared(bn);
  const bool has_layout = shared || (x.numel() > 0 && is_channels_last(x));
  return bn.fused && runs_own_kernels(x, x.scalar_type()) && x.dim() == 4 && has_layout &&
         x.size(1) % 8 == 0 && x.numel() / 8 < kMaxVectors &&
         is_channel_vector(bn.weight, x, shared) && is_channel_vector(bn.bias, x, shared) &&
         is_channel_vector(bn.running_mean, x, shared) &&
         is_channel_vector(bn.running_var, x, shared) && !evaluation_with_grad;
}

bool fits_addend(const at::Tensor& other, const at::Tensor& x, const BatchNormLayer& bn) {
  return other.device() == x.device() && other.scalar_type() == x.scalar_type() &&
         other.sizes() == x.sizes() && (is_shared(bn) || is_channels_last(other)) &&
         (bn.training || !needs_grad({other}));
}

at::Tensor fused_batch_norm(const at::Tensor& x, const BatchNormLayer& bn) {
  return fused_activation(x, bn, Activation::None).branch;
}

at::Tensor fused_batch_norm_silu(const at::Tensor& x, const BatchNormLayer& bn) {
  return fused_activation(x, bn, Activation::Silu).branch;
}

Fork fused_batch_norm_relu(const at::Tensor& x, const BatchNormLayer& bn) {
  return fused_activation(x, bn, Activation::Relu);
}

Fork fused_batch_norm_add_relu(const at::Tensor& x_in, const BatchNormLayer& bn,
                               const at::Tensor& addend_in, const BatchNormLayer* bn_addend) {
  const auto x = in_kernel_layout(x_in, x_in.scalar_type());
  const auto addend = in_kernel_layout(addend_in, x_in.scalar_type());
  // An autograd function does not accept undefined tensors.
  std::optional<at::Tensor> weight2, bias2;
  if (bn_addend != nullptr) {
    weight2 = bn_addend->weight;
    bias2 = bn_addend->bias;
  }
  if (!needs_grad({x, bn.weight, bn.bias, addend, weight2.value_or(at::Tensor()),
                   bias2.value_or(at::Tensor())})) {
    const auto y = run_forward(x, bn, addend, bn_addend, /*keep=*/false).y;
    return {y, y};
  }
  const auto outputs =
      BatchNormAddRelu::apply(x, bn.weight, bn.bias, addend, weight2, bias2, &bn, bn_addend);
  return {outputs[0], outputs[1]};
}

}  // namespace ddp::ops::detail
