// SPDX-License-Identifier: Apache-2.0
#include "ops/kernel_types.cuh"
#include "ops/vision/pooled_linear_kernels.hpp"

namespace ddp::ops::detail {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 512;
constexpr int kForwardImages = 4;  // per block
constexpr int kForwardParts = 2;   // warps per image, each with a part of the channels
constexpr int kWarps = kThreads / kWarp;
constexpr int kColumns = 16;  // of the weight's gradient per block
constexpr int kGroups = kThreads / kColumns;
constexpr int kStagedNumbers = 8192;  // gradients of logits in shared memory

/// Eight channels' means over an image's pixels.
template <typename T>
__device__ void pool_vector(const T* x, int pixels, int channels, float (&mean)[8]) {
#pragma unroll
  for (float& value : mean) {
    value = 0;
  }
#pragma unroll 4
  for (int pixel = 0; pixel < pixels; ++pixel) {
    Vector8<T> vector;
    vector.bits[0] = *reinterpret_cast<const uint4*>(x + int64_t{pixel} * channels);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      mean[j] += to_float(vector.values[j]);
    }
  }
  const float inverse = 1.0F / static_cast<float>(pixels);
#pragma unroll
  for (float& value : mean) {
    value *= inverse;
  }
}

/// Nonexistent classes repeat the last class, and their sums are dropped. A branch around each load
/// would serialise the loads.
__device__ __forceinline__ int existing_class(int k, const PooledShape& shape) {
  return min(k, shape.classes - 1);
}

/// Sums kNumbers per lane over a warp: lane i gets the sum of class i / (kWarp / kNumbers). Each
/// exchange halves the remaining numbers per lane.
template <int kNumbers, int kOffset = kWarp / 2>
__device__ __forceinline__ float sum_over_warp(const float (&sums)[kNumbers]) {
  if constexpr (kNumbers > 1) {
    constexpr int kLeft = kNumbers / 2;
    const bool upper = (threadIdx.x & kOffset) != 0;
    float left[kLeft];
#pragma unroll
    for (int k = 0; k < kLeft; ++k) {
      const float other = __shfl_xor_sync(~0U, upper ? sums[k] : sums[k + kLeft], kOffset);
      left[k] = (upper ? sums[k + kLeft] : sums[k]) + other;
    }
    return sum_over_warp<kLeft, kOffset / 2>(left);
  } else if constexpr (kOffset > 0) {
    const float both[1] = {sums[0] + __shfl_xor_sync(~0U, sums[0], kOffset)};
    return sum_over_warp<1, kOffset / 2>(both);
  } else {
    return sums[0];
  }
}

/// Two warps per image. A lane multiplies its channels with all classes while they are in
/// registers.
template <typename T, typename W, int kClasses>
__global__ void pooled_linear(PooledShape shape, const T* x, const W* weight, const W* bias,
                              float* pooled, T* logits) {
  __shared__ float parts[kForwardImages][kForwardParts][kClasses];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int slot = warp / kForwardParts, part = warp % kForwardParts;
  const int image = static_cast<int>(blockIdx.x) * kForwardImages + slot;
  float sums[kClasses] = {};
  if (image < shape.batch) {
    const T* from = x + int64_t{image} * shape.pixels * shape.channels;
    float* to = pooled + int64_t{image} * shape.channels;
    for (int c = (part * kWarp + lane) * 8; c < shape.channels; c += kForwardParts * kWarp * 8) {
      float mean[8];
      pool_vector(from + c, shape.pixels, shape.channels, mean);
      store8(to + c, 1, mean);
#pragma unroll
      for (int k = 0; k < kClasses; ++k) {
        float row[8];
        load8(weight + existing_class(k, shape) * shape.channels + c, 1, row);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          sums[k] += mean[j] * row[j];
        }
      }
    }
  }
  constexpr int kLanes = kWarp / kClasses;
  const float sum = sum_over_warp(sums);
  if (lane % kLanes == 0) {
    parts[slot][part][lane / kLanes] = sum;
  }
  __syncthreads();
  if (part == 0 && lane < shape.classes && image < shape.batch) {
    float value = to_float(bias[lane]);
#pragma unroll
    for (int i = 0; i < kForwardParts; ++i) {
      value += parts[slot][i][lane];
    }
    logits[image * shape.classes + lane] = from_float<T>(value);
  }
}

template <typename T>
__device__ void put(const GradOut& out, int64_t index, float value) {
  T* data = static_cast<T*>(out.data) + index;
  *data = from_float<T>(out.beta == 0.0F ? value : to_float(*data) + value);
}

__device__ void put(const GradOut& out, int64_t index, float value) {
  switch (out.element) {
    case Element::Bfloat16:
      return put<__nv_bfloat16>(out, index, value);
    case Element::Float16:
      return put<__half>(out, index, value);
    default:
      return put<float>(out, index, value);
  }
}

/// grad_x of eight channels of one image.
template <typename T, typename W>
__device__ void input_gradient(const PooledShape& shape, int block, const T* grad_logits,
                               const W* weight, T* grad_x) {
  const int vectors = shape.channels / 8;
  const int index = block * kThreads + static_cast<int>(threadIdx.x);
  if (index >= shape.batch * vectors) {
    return;
  }
  const int image = index / vectors, c = index % vectors * 8;
  float sums[8] = {};
#pragma unroll 5
  for (int k = 0; k < shape.classes; ++k) {
    const float grad = to_float(grad_logits[image * shape.classes + k]);
    float row[8];
    load8(weight + k * shape.channels + c, 1, row);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sums[j] += grad * row[j];
    }
  }
  const float inverse = 1.0F / static_cast<float>(shape.pixels);
  Vector8<T> vector;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    vector.values[j] = from_float<T>(sums[j] * inverse);
  }
  T* to = grad_x + int64_t{image} * shape.pixels * shape.channels + c;
  for (int pixel = 0; pixel < shape.pixels; ++pixel) {
    *reinterpret_cast<uint4*>(to + int64_t{pixel} * shape.channels) = vector.bits[0];
  }
}

/// kColumns columns of the weight's gradient, or, in the last block, the bias's gradient as a
/// column of ones. Each group of threads sums a part of the images in a fixed order.
template <typename T, int kClasses>
__device__ void weight_gradient(const PooledShape& shape, int block, const T* grad_logits,
                                const float* pooled, const GradOut& grad_weight,
                                const GradOut& grad_bias) {
  // Holds grads[image][class] of some images, at the end parts[class][warp][column].
  __shared__ __align__(16) float shared[kStagedNumbers];
  static_assert(kClasses * kWarps * kColumns <= kStagedNumbers);
  constexpr int kStagedImages = kStagedNumbers / kClasses;
  const int thread = static_cast<int>(threadIdx.x);
  const int column = thread % kColumns, group = thread / kColumns;
  const bool is_bias = block * kColumns >= shape.channels;
  const int c = block * kColumns + column;
  const bool reads = !is_bias && c < shape.channels;
  float sums[kClasses] = {};
  for (int first = 0; first < shape.batch; first += kStagedImages) {
    const int images = min(kStagedImages, shape.batch - first);
    __syncthreads();
#pragma unroll 8
    for (int i = thread; i < images * kClasses; i += kThreads) {
      shared[i] = to_float(grad_logits[int64_t{first + i / kClasses} * shape.classes +
                                       existing_class(i % kClasses, shape)]);
    }
    __syncthreads();
#pragma unroll 8
    for (int image = group; image < images; image += kGroups) {
      const float value =
          reads ? pooled[int64_t{first + image} * shape.channels + c] : static_cast<float>(is_bias);
      const float* grads = shared + image * kClasses;
#pragma unroll
      for (int k = 0; k < kClasses; ++k) {
        sums[k] += value * grads[k];
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kClasses; ++k) {
    const float sum = sums[k] + __shfl_xor_sync(~0U, sums[k], kColumns);  // the warp's two groups
    if (thread % kWarp < kColumns) {
      shared[(k * kWarps + thread / kWarp) * kColumns + column] = sum;
    }
  }
  __syncthreads();
  for (int k = group; k < shape.classes; k += kGroups) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      sum += shared[(k * kWarps + warp) * kColumns + column];
    }
    if (reads && grad_weight.data != nullptr) {
      put(grad_weight, int64_t{k} * shape.channels + c, sum);
    } else if (is_bias && column == 0 && grad_bias.data != nullptr) {
      put(grad_bias, k, sum);
    }
  }
}

/// The first blocks compute grad_x, the others the gradients of weight and bias.
template <typename T, typename W, int kClasses>
__global__ void __launch_bounds__(kThreads)
    pooled_linear_backward(PooledShape shape, int input_blocks, const T* grad_logits,
                           const W* weight, const float* pooled, T* grad_x, GradOut grad_weight,
                           GradOut grad_bias) {
  const int block = static_cast<int>(blockIdx.x);
  if (block < input_blocks) {
    input_gradient(shape, block, grad_logits, weight, grad_x);
  } else {
    weight_gradient<T, kClasses>(shape, block - input_blocks, grad_logits, pooled, grad_weight,
                                 grad_bias);
  }
}

template <typename T>
__global__ void pool(PooledShape shape, const T* x, T* pooled) {
  const int vectors = shape.channels / 8;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= int64_t{shape.batch} * vectors) {
    return;
  }
  const int64_t image = index / vectors;
  const int c = static_cast<int>(index % vectors) * 8;
  float mean[8];
  pool_vector(x + image * shape.pixels * shape.channels + c, shape.pixels, shape.channels, mean);
  Vector8<T> vector;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    vector.values[j] = from_float<T>(mean[j]);
  }
  reinterpret_cast<uint4*>(pooled)[index] = vector.bits[0];
}

template <typename T>
__global__ void unpool(PooledShape shape, const T* grad_pooled, T* grad_x) {
  const int vectors = shape.channels / 8;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= int64_t{shape.batch} * shape.pixels * vectors) {
    return;
  }
  const int64_t image = index / (int64_t{shape.pixels} * vectors);
  const float inverse = 1.0F / static_cast<float>(shape.pixels);
  Vector8<T> vector;
  vector.bits[0] = reinterpret_cast<const uint4*>(grad_pooled)[image * vectors + index % vectors];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    vector.values[j] = from_float<T>(to_float(vector.values[j]) * inverse);
  }
  reinterpret_cast<uint4*>(grad_x)[index] = vector.bits[0];
}

}  // namespace

cudaError_t launch_pooled_linear(const PooledShape& shape, const void* x, const void* weight,
                                 const void* bias, float* pooled, void* logits,
                                 cudaStream_t stream) {
  return with_compute_type(shape.element, [&](auto tag) {
    return with_float_type(shape.weights, [&](auto weight_tag) {
      using T = typename decltype(tag)::type;
      using W = typename decltype(weight_tag)::type;
      const int blocks = (shape.batch + kForwardImages - 1) / kForwardImages;
      const auto launch = [&](auto kernel) {
        kernel<<<blocks, kForwardImages * kForwardParts * kWarp, 0, stream>>>(
            shape, static_cast<const T*>(x), static_cast<const W*>(weight),
            static_cast<const W*>(bias), pooled, static_cast<T*>(logits));
      };
      if (shape.classes <= kMaxFusedClasses / 2) {
        launch(pooled_linear<T, W, kMaxFusedClasses / 2>);
      } else {
        launch(pooled_linear<T, W, kMaxFusedClasses>);
      }
      return cudaGetLastError();
    });
  });
}

cudaError_t launch_pooled_linear_backward(const PooledShape& shape, const void* grad_logits,
                                          const void* weight, const float* pooled, void* grad_x,
                                          const GradOut& grad_weight, const GradOut& grad_bias,
                                          cudaStream_t stream) {
  return with_compute_type(shape.element, [&](auto tag) {
    return with_float_type(shape.weights, [&](auto weight_tag) {
      using T = typename decltype(tag)::type;
      using W = typename decltype(weight_tag)::type;
      const int64_t input_vectors = int64_t{shape.batch} * (shape.channels / 8);
      const int input_blocks =
          grad_x == nullptr ? 0 : static_cast<int>(num_blocks(input_vectors, kThreads));
      const int columns = (shape.channels + kColumns - 1) / kColumns;
      const auto launch = [&](auto kernel) {
        kernel<<<input_blocks + columns + 1, kThreads, 0, stream>>>(
            shape, input_blocks, static_cast<const T*>(grad_logits), static_cast<const W*>(weight),
            pooled, static_cast<T*>(grad_x), grad_weight, grad_bias);
      };
      if (shape.classes <= kMaxFusedClasses / 2) {
        launch(pooled_linear_backward<T, W, kMaxFusedClasses / 2>);
      } else {
        launch(pooled_linear_backward<T, W, kMaxFusedClasses>);
      }
      return cudaGetLastError();
    });
  });
}

cudaError_t launch_pool(const PooledShape& shape, const void* x, void* pooled,
                        cudaStream_t stream) {
  return with_compute_type(shape.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    pool<T><<<num_blocks(int64_t{shape.batch} * (shape.channels / 8), kThreads), kThreads, 0,
              stream>>>(shape, static_cast<const T*>(x), static_cast<T*>(pooled));
    return cudaGetLastError();
  });
}

cudaError_t launch_unpool(const PooledShape& shape, const void* grad_pooled, void* grad_x,
                          cudaStream_t stream) {
  return with_compute_type(shape.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t threads = int64_t{shape.batch} * shape.pixels * (shape.channels / 8);
    unpool<T><<<num_blocks(threads, kThreads), kThreads, 0, stream>>>(
        shape, static_cast<const T*>(grad_pooled), static_cast<T*>(grad_x));
    return cudaGetLastError();
  });
}

}  // namespace ddp::ops::detail
