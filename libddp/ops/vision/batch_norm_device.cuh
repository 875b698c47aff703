// SPDX-License-Identifier: Apache-2.0
// Common to the kernels of batch_norm_kernels.hpp: 16-byte vectors of 8 channels, the split of an
// activation over threads, and the arithmetic of a channel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops/vision/batch_norm_sums.cuh"

namespace ddp::ops::detail {

using Vector = uint4;

template <typename T>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  using Type = __nv_bfloat162;
  static constexpr unsigned kLowest = 0xff80ff80u;  // minus infinity, twice
  static __device__ float2 widen(Type v) { return __bfloat1622float2(v); }
  static __device__ Type narrow(float a, float b) { return __floats2bfloat162_rn(a, b); }
};
template <>
struct Pair<__half> {
  using Type = __half2;
  static constexpr unsigned kLowest = 0xfc00fc00u;
  static __device__ float2 widen(Type v) { return __half22float2(v); }
  static __device__ Type narrow(float a, float b) { return __floats2half2_rn(a, b); }
};

template <typename T>
__device__ void unpack(const Vector& packed, float (&values)[8]) {
  const auto* pairs = reinterpret_cast<const typename Pair<T>::Type*>(&packed);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = Pair<T>::widen(pairs[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

template <typename T>
__device__ Vector pack(const float (&values)[8]) {
  Vector packed;
  auto* pairs = reinterpret_cast<typename Pair<T>::Type*>(&packed);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = Pair<T>::narrow(values[2 * i], values[2 * i + 1]);
  }
  return packed;
}

/// The grid of a kernel whose registers allow one block per multiprocessor, not kBlocksPerSm.
inline dim3 half_grid(const BatchNormGrid& grid) {
  return dim3(grid.blocks > 1 ? grid.blocks / kBlocksPerSm : 1, grid.slices);
}

/// Lets the next kernel's blocks start. A summing kernel calls it when only the sums remain.
__device__ inline void allow_next_launch() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/// Waits until the previous launch has ended and its results are visible, if this kernel started
/// early.
__device__ inline void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

/// Launches a kernel. If it `follows` the previous launch, the kernel itself waits for that launch.
template <typename Call>
cudaError_t launch_after(void (*kernel)(Call), const Call& call, dim3 blocks, bool follows,
                         cudaStream_t stream) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = follows ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, call);
}

/// Eight channels' values of a per-channel vector.
__device__ inline void load8(const float* values, int vector, float (&out)[8]) {
  const auto* quads = reinterpret_cast<const float4*>(values) + 2 * vector;
  const float4 a = quads[0], b = quads[1];
  out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
  out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
}

/// A thread's place: its vector of channels, its first row, and the step to its next row.
/// Vectors are counted in 32 bits: an activation has fewer than 2^31.
struct Lane {
  int vector, row, step;

  __device__ explicit Lane(const BatchNormGrid& grid)
      : vector(static_cast<int>(blockIdx.y) * grid.slice +
               (static_cast<int>(threadIdx.x) & (grid.slice - 1))) {
    const int rows_of_block = kThreads / grid.slice;
    row = static_cast<int>(blockIdx.x) * rows_of_block + static_cast<int>(threadIdx.x) / grid.slice;
    step = static_cast<int>(gridDim.x) * rows_of_block;
  }
};

/// Where a kernel begins. The L2 cache still holds the end of the activation from the previous
/// kernel. So sums go backwards through the activation, and the next pass goes forwards.
enum class From { Start, End };

/// Calls visit() for this thread's rows: kRows at once, then the rest. `visit` gets the index of
/// the first vector, the distance to the next in vectors, and the number of rows. In the main loop
/// this number is a constant, so no load waits for a comparison.
template <int kRows, From kFrom, typename Visit>
__device__ void for_each_row(const BatchNormGrid& grid, const Lane& lane, const Visit& visit) {
  const int rows = static_cast<int>(grid.rows);
  const int distance = (kFrom == From::Start ? 1 : -1) * lane.step * grid.vectors;
  int row = lane.row;
  int at = (kFrom == From::Start ? row : rows - 1 - row) * grid.vectors + lane.vector;
  for (; row < rows - (kRows - 1) * lane.step; row += kRows * lane.step) {
    visit(at, distance, kRows);
    at += kRows * distance;
  }
  if (row < rows) {
    visit(at, distance, (rows - row + lane.step - 1) / lane.step);
  }
}

__device__ inline float median(float a, float b, float c) {
  return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c));
}

/// A variance from plain sums of squares loses digits if a channel's mean is far from zero, so the
/// sums are of x - shift. The shift is the median of three rows from the middle of the activation,
/// because one row may be an outlier, such as a black corner.
struct ShiftRows {
  int64_t first, second, third;

  __device__ explicit ShiftRows(int64_t rows)
      : first(rows * 3 / 16), second(rows * 7 / 16), third(rows * 13 / 16) {}

  template <typename T>
  __device__ void load(const Vector* x, const BatchNormGrid& grid, int vector,
                       float (&shift)[8]) const {
    float others[8], more[8];
    unpack<T>(x[first * grid.vectors + vector], shift);
    unpack<T>(x[second * grid.vectors + vector], others);
    unpack<T>(x[third * grid.vectors + vector], more);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      shift[i] = median(shift[i], others[i], more[i]);
    }
  }
  /// Same, for one channel.
  template <typename T>
  __device__ float load(const void* x, const BatchNormGrid& grid, int channel) const {
    const auto* values = static_cast<const T*>(x) + channel;
    const int64_t channels = int64_t{8} * grid.vectors;
    return median(static_cast<float>(values[first * channels]),
                  static_cast<float>(values[second * channels]),
                  static_cast<float>(values[third * channels]));
  }
};

/// A channel's inputs other than the sums, loaded early.
struct ChannelInputs {
  float shift, weight, bias;

  template <typename T>
  __device__ static ChannelInputs load(const void* x, const BatchNormGrid& grid, const Affine& bn,
                                       int channel) {
    return {ShiftRows(grid.rows).load<T>(x, grid, channel), bn.weight[channel], bn.bias[channel]};
  }
};

/// Mean and invstd of a channel, from the sums of x - shift and of its square.
struct ChannelStatistics {
  float mean, variance, invstd;

  __device__ ChannelStatistics(int64_t rows, float eps, float shift, double sum, double square) {
    const double share = 1.0 / static_cast<double>(rows);
    const double centre = sum * share;
    const double spread = square * share - centre * centre;
    mean = static_cast<float>(shift + centre);
    variance = static_cast<float>(spread);
    variance = variance < 0 ? 0 : variance;  // NaN stays
    invstd = 1.0F / sqrtf(variance + eps);
  }
  /// Writes the statistics and updates the running estimates.
  __device__ void write(const StatisticsCall& call, int channel, int64_t rows) const {
    call.mean[channel] = mean;
    call.invstd[channel] = invstd;
    const auto count = static_cast<float>(rows);
    const float unbiased = rows > 1 ? variance * (count / (count - 1)) : variance;
    float& running_mean = call.running_mean[channel];
    float& running_var = call.running_var[channel];
    running_mean += call.momentum * (mean - running_mean);
    running_var += call.momentum * (unbiased - running_var);
  }
  __device__ void write_moments(float* moments, int channel, int channels, int64_t rows) const {
    moments[channel] = mean;
    moments[channels + channel] = variance;
    if (channel == 0) {
      moments[2 * channels] = static_cast<float>(rows);
    }
  }
};

/// A channel's saved values for a backward pass, loaded early.
struct ChannelSaved {
  float mean, invstd, weight;

  __device__ ChannelSaved(const BackwardTarget& target, int channel)
      : mean(target.mean[channel]),
        invstd(target.invstd[channel]),
        weight(target.weight[channel]) {}
};

/// Gradients of a channel's weight and bias, and the coefficients of grad_x = a d + b x + c, from
/// the sums of d and of d * (x - mean) over `rows` (Ioffe and Szegedy, arXiv:1502.03167, section
/// 3).
struct ChannelBackward {
  float grad_weight, grad_bias, a, b, c;

  __device__ ChannelBackward(const ChannelSaved& saved, double rows, double sum, double product) {
    const double share = 1.0 / rows;
    const double scale = static_cast<double>(saved.weight) * saved.invstd;
    const double normalised = product * saved.invstd;
    const double slope = -scale * saved.invstd * normalised * share;
    grad_weight = static_cast<float>(normalised);
    grad_bias = static_cast<float>(sum);
    a = static_cast<float>(scale);
    b = static_cast<float>(slope);
    c = static_cast<float>(-scale * sum * share - slope * saved.mean);
  }
  __device__ void write_grads(const BackwardTarget& target, int channel) const {
    float& weight_slot = target.grad_weight[channel];
    float& bias_slot = target.grad_bias[channel];
    weight_slot = target.add_to_weight ? weight_slot + grad_weight : grad_weight;
    bias_slot = target.add_to_bias ? bias_slot + grad_bias : grad_bias;
  }
  __device__ void write_coefficients(const BackwardTarget& target, int channel,
                                     int channels) const {
    target.coefficients[channel] = a;
    target.coefficients[channels + channel] = b;
    target.coefficients[2 * channels + channel] = c;
  }
};

/// Finishes a channel, in the last block of a reduction.
__device__ inline void finish_backward(const BackwardTarget& target, int channel, int channels,
                                       int64_t rows, double sum, double product) {
  const ChannelBackward result(ChannelSaved(target, channel), static_cast<double>(rows), sum,
                               product);
  result.write_grads(target, channel);
  if (target.sum != nullptr) {
    target.sum[channel] = static_cast<float>(sum);
    target.product[channel] = static_cast<float>(product);
  } else {
    result.write_coefficients(target, channel, channels);
  }
}

/// Adds x - shift and its square to a thread's sums.
template <typename T>
__device__ void add_moments(const Vector& packed, const float (&shift)[8], float (&sum)[8],
                            float (&square)[8]) {
  float values[8];
  unpack<T>(packed, values);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float centred = values[i] - shift[i];
    sum[i] += centred;
    square[i] += centred * centred;
  }
}

/// bn(x) = scale * x + shift.
struct ScaleShift {
  float scale[8], shift[8];

  ScaleShift() = default;
  __device__ ScaleShift(const Affine& bn, int vector) {
    float mean[8], weight[8], bias[8];
    load8(bn.mean, vector, mean);
    load8(bn.invstd, vector, scale);
    load8(bn.weight, vector, weight);
    load8(bn.bias, vector, bias);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float invstd = bn.from_variance ? rsqrtf(scale[i] + bn.eps) : scale[i];
      scale[i] = invstd * weight[i];
      shift[i] = bias[i] - mean[i] * scale[i];
    }
  }
};

/// grad_x = a d + b x + c.
struct Coefficients {
  float a[8], b[8], c[8];

  Coefficients() = default;
  __device__ Coefficients(const float* coefficients, int vectors, int vector) {
    load8(coefficients, vector, a);
    load8(coefficients, vectors + vector, b);
    load8(coefficients, 2 * vectors + vector, c);
  }
};

/// 1 / (1 + exp(-z)) within a few units of float32's last place, subnormal results as 0. CUDA's
/// intrinsics spend more instructions on subnormal numbers.
__device__ __forceinline__ float fast_sigmoid(float z) {
  constexpr float kLog2E = 1.44269504F;
  float power, sigmoid;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-kLog2E * z));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1 + power));
  return sigmoid;
}

enum class Form { Plain, Residual, TwoNorms };

/// Computes one vector's values after the activation. Bit i of the result is set if value i passed
/// the ReLU.
template <typename T, Form kForm, Activation kActivation = Activation::Relu>
__device__ unsigned normalise(const Vector& packed, const Vector& added, const ScaleShift& bn,
                              const ScaleShift& bn2, float (&values)[8]) {
  float others[8];
  unpack<T>(packed, values);
  if constexpr (kForm != Form::Plain) {
    unpack<T>(added, others);
  }
  unsigned passed = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float value = values[i] * bn.scale[i] + bn.shift[i];
    if constexpr (kForm == Form::Residual) {
      value += others[i];
    } else if constexpr (kForm == Form::TwoNorms) {
      value += others[i] * bn2.scale[i];
    }
    if constexpr (kActivation == Activation::Relu) {
      const bool passes = !(value <= 0);  // NaN passes, as through at::relu
      passed |= static_cast<unsigned>(passes) << i;
      values[i] = passes ? value : 0;
    } else {
      values[i] = kActivation == Activation::Silu ? value * fast_sigmoid(value) : value;
    }
  }
  return passed;
}

/// Zeroes the values that the ReLU blocked.
__device__ inline void keep_passed(unsigned passed, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[i] = (passed >> i & 1) != 0 ? values[i] : 0;
  }
}

template <typename T>
__device__ void add_to(float (&values)[8], const Vector& packed) {
  float others[8];
  unpack<T>(packed, others);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[i] += others[i];
  }
}

/// sum += values
__device__ __forceinline__ void add_values(const float (&values)[8], float (&sum)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum[i] += values[i];
  }
}

/// sum += d * (x - mean)
template <typename T>
__device__ void add_products(const float (&d)[8], const Vector& x, const float (&mean)[8],
                             float (&sum)[8]) {
  float values[8];
  unpack<T>(x, values);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum[i] += d[i] * (values[i] - mean[i]);
  }
}

template <typename T>
__device__ void write_grad(const Coefficients& with, const float (&d)[8], const Vector& input,
                           Vector* grad_x) {
  float values[8];
  unpack<T>(input, values);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[i] = with.a[i] * d[i] + (with.b[i] * values[i] + with.c[i]);
  }
  *grad_x = pack<T>(values);
}

}  // namespace ddp::ops::detail
