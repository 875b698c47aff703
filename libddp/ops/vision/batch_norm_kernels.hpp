// SPDX-License-Identifier: Apache-2.0
// CUDA kernels of ddp/ops/vision.hpp: raw pointers, no LibTorch.
//
// An activation is a matrix [rows, channels] of 16-bit values in memory order (channels_last), rows
// = batch * height * width, channels a multiple of 8. Per-channel vectors are float32. Every launch
// is asynchronous on `stream` and returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace ddp::ops::detail {

enum class Half { Bfloat16, Float16 };

/// What follows a normalisation. A backward reads a ReLU as a mask, and computes SiLU's derivative
/// from x.
enum class Activation { Relu, None, Silu };

/// Whether the kernels on the current device, number `device`, are compiled for compute capability
/// 9.0. Only such code can wait for the previous launch itself and has clusters, whatever the GPU
/// supports. Cached per device.
bool runs_hopper_code(int device);

/// How a grid covers an activation: a block processes `slice` vectors of 8 channels (gridDim.y
/// slices). gridDim.x blocks share the rows.
struct BatchNormGrid {
  int64_t rows = 0;
  int vectors = 0;  ///< per row: channels / 8
  int slice = 0;    ///< a power of two that divides `vectors`
  int slices = 0;   ///< gridDim.y
  int blocks = 0;   ///< gridDim.x
};

/// All blocks of the grid are resident on `num_sms` multiprocessors at once. rows * channels / 8
/// must be below 2^31. Summing kernels use sums_grid, the others map_grid.
BatchNormGrid sums_grid(int64_t rows, int64_t channels, int num_sms);
BatchNormGrid map_grid(int64_t rows, int64_t channels, int num_sms);

/// Global memory of a reduction. Each block writes its sums to `partials`. The last block of a
/// slice adds them in block order, so results never depend on timing.
struct ReductionScratch {
  float* partials = nullptr;  ///< at least partial_floats(grid, sums)
  /// Two counters per slice, zero before the first use: arrived blocks (zero again when a kernel
  /// ends), and how often all blocks arrived.
  unsigned* kernel_counters = nullptr;
};

/// Sums per channel: 2 forward; 2 backward, 3 with two normalisations.
inline size_t partial_floats(const BatchNormGrid& grid, int sums) {
  return static_cast<size_t>(grid.blocks) * grid.vectors * 8 * sums;
}

/// Normalises a channel: (x - mean) * invstd * weight + bias.
struct Affine {
  const float* mean = nullptr;
  const float* invstd = nullptr;  ///< or, with from_variance, the variance
  const float* weight = nullptr;
  const float* bias = nullptr;
  float eps = 0;
  bool from_variance = false;
};

/// Batch statistics of x: mean and invstd = 1 / sqrt(biased variance + eps). Updates the running
/// estimates by `momentum` (with the unbiased variance, as PyTorch).
struct StatisticsCall {
  BatchNormGrid grid;
  ReductionScratch scratch;
  const void* x = nullptr;
  float* mean = nullptr;
  float* invstd = nullptr;
  float* running_mean = nullptr;
  float* running_var = nullptr;
  float momentum = 0;
  float eps = 0;
  /// [2 * channels + 1]: if set, receives means, biased variances and the number of rows, and
  /// nothing else is written.
  float* moments = nullptr;
};
cudaError_t launch_statistics(const StatisticsCall& call, Half dtype, cudaStream_t stream);

/// y = activation(bn(x)), relu(bn(x) + residual) or relu(bn(x) + bn2(z)).
struct ApplyCall {
  BatchNormGrid grid;
  const void* x = nullptr;
  Affine bn;
  const void* addend = nullptr;  ///< residual or z; nullptr: none
  bool second = false;           ///< the addend is normalised by bn2
  Affine bn2;
  void* y = nullptr;
  uint8_t* mask =
      nullptr;  ///< bit i of byte [row, vector]: element 8 * vector + i passes; or nullptr
  bool follows_sums = false;                 ///< see BackwardApplyCall
  Activation activation = Activation::Relu;  ///< without an addend
};
cudaError_t launch_apply(const ApplyCall& call, Half dtype, cudaStream_t stream);

/// One normalisation's part of a backward pass.
struct BackwardTarget {
  const void* x = nullptr;
  const float* mean = nullptr;
  const float* invstd = nullptr;
  const float* weight = nullptr;
  float* grad_weight = nullptr;
  float* grad_bias = nullptr;
  bool add_to_weight = false;     ///< add to grad_weight
  bool add_to_bias = false;       ///< add to grad_bias
  float* coefficients = nullptr;  ///< [3, channels]: grad_x = a * d + b * x + c
  void* grad_x = nullptr;
  /// [channels] each: if set, receive the sums of d and of d * (x - mean), and the coefficients are
  /// not written.
  float* sum = nullptr;
  float* product = nullptr;
};

/// Computes d = mask ? grad (+ grad2) : 0, and from its sums the parameters' gradients and the
/// coefficients of launch_backward_apply. If `sum` is set, the rounded d is written there and then
/// summed. Without a mask there is one gradient and one normalisation.
struct BackwardReduceCall {
  BatchNormGrid grid;
  ReductionScratch scratch;
  const void* grad = nullptr;
  const void* grad2 = nullptr;    ///< or nullptr
  const uint8_t* mask = nullptr;  ///< nullptr: grad is d, or see silu_bias
  void* sum = nullptr;            ///< or nullptr
  BackwardTarget first;
  bool second_used = false;
  BackwardTarget second;
  const float* silu_bias = nullptr;  ///< first's bias: d = grad * silu'(bn(x)), without mask
};
cudaError_t launch_backward_reduce(const BackwardReduceCall& call, Half dtype, cudaStream_t stream);

/// grad_x of one or two normalisations from the same d: `grad` under `mask`, or a sum without mask.
struct BackwardApplyCall {
  BatchNormGrid grid;
  const void* grad = nullptr;
  const uint8_t* mask = nullptr;  ///< nullptr: grad is d, or see silu_bias
  BackwardTarget first;
  bool second_used = false;
  BackwardTarget second;
  /// The previous launch on the stream is the summing kernel. This kernel's blocks may start as
  /// that kernel's blocks end (runs_hopper_code).
  bool follows_sums = false;
  const float* silu_bias = nullptr;  ///< as in BackwardReduceCall
};
cudaError_t launch_backward_apply(const BackwardApplyCall& call, Half dtype, cudaStream_t stream);

/// The grid of kernels for a whole forward or backward. Each thread keeps `rows_of_thread` rows of
/// its slice in registers; 0: the `inputs` activations are too large. The blocks of a slice wait
/// for each other. Few blocks form a cluster (if the code has `clusters`). Otherwise all must be
/// resident, at most one per multiprocessor.
struct SmallGrid {
  BatchNormGrid grid;
  int rows_of_thread = 0;
  bool cluster = false;
};
SmallGrid small_batch_norm_grid(int64_t rows, int64_t channels, int num_sms, int inputs,
                                bool clusters);

/// launch_statistics (also of `second` if apply.second) and launch_apply in one kernel. Of the
/// calls' grids and scratches only `first`'s scratch is used; its partials hold 2 or 4 sums.
struct SmallForwardCall {
  SmallGrid small;
  StatisticsCall first;
  StatisticsCall second;
  ApplyCall apply;
};
cudaError_t launch_small_forward(const SmallForwardCall& call, Half dtype, cudaStream_t stream);

/// launch_backward_reduce and launch_backward_apply in one kernel; coefficients are not written.
struct SmallBackwardCall {
  SmallGrid small;
  BackwardReduceCall reduce;
};
cudaError_t launch_small_backward(const SmallBackwardCall& call, Half dtype, cudaStream_t stream);

/// Merges the statistics of all processes' batches: mean, invstd and the number of rows. Updates
/// the running estimates.
struct MergeCall {
  int processes = 0, channels = 0;
  const float* moments = nullptr;  ///< of the first process (StatisticsCall::moments)
  int stride = 0;                  ///< floats from one process to the next
  float* mean = nullptr;
  float* invstd = nullptr;
  float* count = nullptr;
  float* running_mean = nullptr;
  float* running_var = nullptr;
  float momentum = 0;
  float eps = 0;
};
cudaError_t launch_merge_statistics(const MergeCall& call, cudaStream_t stream);

/// A normalisation's coefficients from the sums over all processes.
struct SharedSumsCall {
  int channels = 0;
  const float* sum = nullptr;
  const float* product = nullptr;
  const float* count = nullptr;  ///< rows of all processes
  BackwardTarget target;         ///< mean, invstd, weight and coefficients
};
cudaError_t launch_shared_coefficients(const SharedSumsCall& call, cudaStream_t stream);

/// Sizes of the 3x3 max pool of stride 2 and padding 1 behind a normalisation.
struct PoolShape {
  int batch = 0, height = 0, width = 0;
  int pooled_height = 0, pooled_width = 0;  ///< (height + 1) / 2, (width + 1) / 2
};

/// y = max_pool(relu(bn(x))). index (or nullptr): one byte per element of y, the position 0..8 of
/// the window's maximum; 15 if nothing passed the ReLU.
struct PoolForwardCall {
  BatchNormGrid grid;  ///< over y
  PoolShape shape;
  const void* x = nullptr;
  Affine bn;
  void* y = nullptr;
  uint8_t* index = nullptr;
};
cudaError_t launch_pool_forward(const PoolForwardCall& call, Half dtype, cudaStream_t stream);

/// Backward of pool, ReLU and normalisation. `apply` false: sums (parameters' gradients and
/// coefficients); true: grad_x. `grad` and `grad2` (or nullptr) are gradients of y.
struct PoolBackwardCall {
  BatchNormGrid grid;  ///< over y: a thread owns the 2x2 pixels of x at one element of y
  ReductionScratch scratch;
  PoolShape shape;
  const void* grad = nullptr;
  const void* grad2 = nullptr;
  const uint8_t* index = nullptr;
  BackwardTarget target;
  bool apply = false;
};
cudaError_t launch_pool_backward(const PoolBackwardCall& call, Half dtype, cudaStream_t stream);

}  // namespace ddp::ops::detail
