// SPDX-License-Identifier: Apache-2.0
// Passes tensors to the kernels of batch_norm_kernels.hpp.
#pragma once

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>

#include "ddp/ops/vision.hpp"
#include "ops/grad_target.hpp"
#include "ops/shared/multiprocessors.hpp"
#include "ops/shared/statistics_exchange.hpp"
#include "ops/tensor_launch.hpp"
#include "ops/vision/batch_norm_kernels.hpp"
#include "ops/vision/batch_norm_sync.hpp"

namespace ddp::ops::detail {

/// The device, stream and element type of one call.
class KernelScope {
 public:
  explicit KernelScope(const at::Tensor& x)
      : guard_(x.device()),
        stream_(at::cuda::getCurrentCUDAStream().stream()),
        dtype_(x.scalar_type() == at::kHalf ? Half::Float16 : Half::Bfloat16) {}

  int num_sms() const { return at::cuda::getCurrentDeviceProperties()->multiProcessorCount; }
  BatchNormGrid sums_grid(const at::Tensor& x) const {
    return detail::sums_grid(x.numel() / x.size(1), x.size(1), num_sms());
  }
  BatchNormGrid map_grid(const at::Tensor& x) const {
    return detail::map_grid(x.numel() / x.size(1), x.size(1), num_sms());
  }
  /// The grid of one kernel over `inputs` activations like x; rows_of_thread 0: too large. Only
  /// this kernel's blocks wait for each other, so they must all fit next to a running collective.
  SmallGrid small_grid(const at::Tensor& x, int inputs) const {
    const int free_sms = std::max(1, num_sms() - reserved_multiprocessors());
    return small_batch_norm_grid(x.numel() / x.size(1), x.size(1), free_sms, inputs, is_hopper());
  }

  bool is_hopper() const { return runs_hopper_code(guard_.current_device().index()); }

  cudaStream_t stream() const { return stream_; }

  template <typename Call>
  void operator()(cudaError_t (*launch)(const Call&, Half, cudaStream_t), const Call& call) const {
    C10_CUDA_CHECK(launch(call, dtype_, stream_));
  }

 private:
  c10::cuda::CUDAGuard guard_;
  cudaStream_t stream_;
  Half dtype_;
};

/// Memory of one reduction, needed until the launch: the next user follows on the same stream.
class Scratch {
 public:
  Scratch(const BatchNormGrid& grid, int sums, const at::Tensor& kernel_counters,
          const at::Tensor& weight)
      : partials_(at::empty({static_cast<int64_t>(partial_floats(grid, sums))},
                            weight.options().requires_grad(false))),
        counters_(kernel_counters.defined()
                      ? kernel_counters
                      : at::zeros({2 * weight.numel()}, partials_.options().dtype(at::kInt))) {}
  ReductionScratch pointers() const {
    return {partials_.mutable_data_ptr<float>(),
            reinterpret_cast<unsigned*>(counters_.mutable_data_ptr<int>())};
  }

 private:
  at::Tensor partials_, counters_;
};

/// Mean and invstd of one batch, [2, channels].
inline at::Tensor empty_statistics(const at::Tensor& weight) {
  return at::empty({2, weight.numel()}, weight.options().requires_grad(false));
}

inline Affine affine_of(const at::Tensor& statistics, const at::Tensor& weight,
                        const at::Tensor& bias) {
  const auto* mean = statistics.const_data_ptr<float>();
  return {mean,
          mean + weight.numel(),
          weight.const_data_ptr<float>(),
          bias.const_data_ptr<float>(),
          0.0F,
          false};
}

/// Normalises by the running estimates.
inline Affine evaluation_affine(const BatchNormLayer& bn) {
  return {bn.running_mean.const_data_ptr<float>(),
          bn.running_var.const_data_ptr<float>(),
          bn.weight.const_data_ptr<float>(),
          bn.bias.const_data_ptr<float>(),
          static_cast<float>(bn.eps),
          true};
}

/// The call that writes the batch statistics of `x` to `statistics`, [2, channels].
inline StatisticsCall statistics_call(const at::Tensor& x, const BatchNormLayer& bn,
                                      const at::Tensor& statistics) {
  auto* mean = statistics.mutable_data_ptr<float>();
  StatisticsCall call;
  call.x = x.const_data_ptr();
  call.mean = mean;
  call.invstd = mean + bn.weight.numel();
  call.running_mean = bn.running_mean.mutable_data_ptr<float>();
  call.running_var = bn.running_var.mutable_data_ptr<float>();
  call.momentum = static_cast<float>(bn.momentum);
  call.eps = static_cast<float>(bn.eps);
  return call;
}

/// Computes the batch statistics of `x`, [2, channels], and updates the running estimates.
inline at::Tensor compute_statistics(const KernelScope& kernels, const at::Tensor& x,
                                     const BatchNormLayer& bn) {
  auto statistics = empty_statistics(bn.weight);
  auto call = statistics_call(x, bn, statistics);
  call.grid = kernels.sums_grid(x);
  const Scratch scratch(call.grid, 2, bn.kernel_counters, bn.weight);
  call.scratch = scratch.pointers();
  kernels(launch_statistics, call);
  return statistics;
}

/// Target of a parameter's gradient for a kernel that writes float32. An unneeded gradient goes to
/// scratch (a frozen parameter may still have a slot).
class ChannelGrad {
 public:
  ChannelGrad(const at::Tensor& parameter, bool wanted) : target_(grad_target(parameter, wanted)) {
    if (!wanted) {
      written_ = at::empty_like(parameter, at::kFloat);
      return;
    }
    const bool fits = target_.memory.scalar_type() == at::kFloat && target_.memory.is_contiguous();
    written_ = fits ? target_.memory : at::empty_like(target_.memory, at::kFloat);
    direct_ = fits;
  }
  float* memory() const { return written_.mutable_data_ptr<float>(); }
  /// Writes zeros in place of a kernel that has nothing to sum.
  void write_zeros() const {
    if (!add()) {
      written_.zero_();
    }
  }
  /// Whether the kernel adds to the existing gradient.
  bool add() const { return direct_ && target_.beta != 0; }
  /// The return value for the backward; call after the kernel's launch.
  at::Tensor result() const {
    if (!direct_ && target_.memory.defined()) {
      target_.write(written_);
    }
    return target_.result();
  }

 private:
  GradTarget target_;
  at::Tensor written_;
  bool direct_ = false;  // written_ is target_.memory
};

/// One normalisation's tensors in a backward pass.
struct BackwardNorm {
  at::Tensor x, weight, statistics;
  ChannelGrad grad_weight, grad_bias;
  at::Tensor coefficients, grad_x;

  /// Only `wanted` gradients of `weight` and `bias` go to slots or are returned.
  BackwardNorm(const at::Tensor& x_in, const at::Tensor& weight_in, const at::Tensor& bias,
               const at::Tensor& statistics_in, const std::array<bool, 2>& wanted)
      : x(x_in),
        weight(weight_in),
        statistics(statistics_in),
        grad_weight(weight_in, wanted[0]),
        grad_bias(bias, wanted[1]),
        coefficients(at::empty({3, weight_in.numel()}, statistics_in.options())),
        grad_x(at::empty_like(x_in)) {}

  BackwardTarget target() const {
    const auto* mean = statistics.const_data_ptr<float>();
    return {x.const_data_ptr(),
            mean,
            mean + weight.numel(),
            weight.const_data_ptr<float>(),
            grad_weight.memory(),
            grad_bias.memory(),
            grad_weight.add(),
            grad_bias.add(),
            coefficients.mutable_data_ptr<float>(),
            grad_x.mutable_data_ptr()};
  }
};

/// The statistics of x, and of z if bn_z is given, over all processes' batches, in one all-gather.
/// Each is [2 * channels + 1]: mean and invstd as in empty_statistics, and the number of rows.
/// Updates the running estimates.
std::array<at::Tensor, 2> compute_shared_statistics(const KernelScope& kernels, const at::Tensor& x,
                                                    const BatchNormLayer& bn, const at::Tensor& z,
                                                    const BatchNormLayer* bn_z);

/// The sums of a backward over all processes. Construct before the summing kernel, with its
/// targets. `exchange` nullptr: the kernel writes the coefficients itself.
class SharedSums {
 public:
  SharedSums(StatisticsExchange* exchange, const at::Tensor& statistics, BackwardTarget& first,
             BackwardTarget* second);
  /// Writes zeros in place of a kernel that has nothing to sum.
  void write_zeros() const {
    if (sums_.defined()) {
      sums_.zero_();
    }
  }
  /// After the summing kernel: sums over processes and writes the coefficients of both targets.
  void finish(const KernelScope& kernels, const BackwardTarget& first,
              const BackwardTarget* second) const;

 private:
  StatisticsExchange* exchange_;
  at::Tensor statistics_, sums_;  // sums: [2 or 4, channels]
};

/// Whether the node of `ctx` needs the gradients of its inputs `first` and `first + 1`.
inline std::array<bool, 2> wanted_pair(torch::autograd::AutogradContext* ctx, size_t first) {
  return {ctx->needs_input_grad(first), ctx->needs_input_grad(first + 1)};
}

/// The gradient in the kernels' layout; undefined stays undefined.
inline at::Tensor in_kernel_layout(const at::Tensor& grad, at::ScalarType dtype) {
  if (!grad.defined()) {
    return grad;
  }
  const auto dense = grad.to(dtype).contiguous(at::MemoryFormat::ChannelsLast);
  return is_aligned(dense) ? dense : dense.clone();
}

inline const void* pointer(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

/// A second tensor with the same memory. Autograd must not see a view, since both are outputs of
/// one node.
inline at::Tensor second_handle(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return at::alias(tensor);
}

/// Whether a forward must save tensors for a backward.
inline bool needs_grad(std::initializer_list<at::Tensor> inputs) {
  return at::GradMode::is_enabled() &&
         std::any_of(inputs.begin(), inputs.end(),
                     [](const at::Tensor& t) { return t.defined() && t.requires_grad(); });
}

}  // namespace ddp::ops::detail
