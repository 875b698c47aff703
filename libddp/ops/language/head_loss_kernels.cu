// SPDX-License-Identifier: Apache-2.0
// Memory moves one read and one write of each logit: a block keeps the beginning of its row in
// shared memory and reads the rest again, from the end, where most of it is still in the L2 cache.
#include "ops/language/head_loss_kernels.hpp"

#include <algorithm>
#include <limits>

#include "ops/kernel_types.cuh"

namespace ddp::ops::detail {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kVector = 8;
constexpr int kAhead = 4;  // reads of a thread in flight
constexpr int64_t kStride = int64_t{kThreads} * kVector;
constexpr int64_t kMaxKeptBytes = 112 * 1024;  // of a row
constexpr float kLowest = -8e37F;              // below all logits, and its differences are finite
constexpr float kLog2e = 1.4426950408889634F;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// The largest logit, its first place and the sum of exp(x - largest). With label smoothing also
/// the sum of x - largest and the number of its terms: a sum of x would round off a common offset.
struct Softmax {
  float largest = kLowest;
  float sum = 0;
  float total = 0;
  float count = 0;
  int place = std::numeric_limits<int>::max();
};

/// exp(x) in one multiplication and one instruction; results below 2^-126 are 0.
__device__ float fast_exp(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * kLog2e));
  return result;
}

/// `total` over `count` terms for another largest logit.
__device__ float total_for(float largest, const Softmax& of) {
  return of.count == 0 ? 0 : of.total + of.count * (of.largest - largest);
}

__device__ Softmax merge(const Softmax& a, const Softmax& b) {
  const bool takes_b = b.largest > a.largest || (b.largest == a.largest && b.place < a.place);
  const float largest = takes_b ? b.largest : a.largest;
  return {largest, a.sum * fast_exp(a.largest - largest) + b.sum * fast_exp(b.largest - largest),
          total_for(largest, a) + total_for(largest, b), a.count + b.count,
          takes_b ? b.place : a.place};
}

__device__ Softmax of_block(Softmax own) {
  __shared__ Softmax of_warps[kWarps];
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    own = merge(own,
                {__shfl_xor_sync(~0U, own.largest, offset), __shfl_xor_sync(~0U, own.sum, offset),
                 __shfl_xor_sync(~0U, own.total, offset), __shfl_xor_sync(~0U, own.count, offset),
                 __shfl_xor_sync(~0U, own.place, offset)});
  }
  if (threadIdx.x % kWarp == 0) {
    of_warps[threadIdx.x / kWarp] = own;
  }
  __syncthreads();
  own = of_warps[0];
  for (int warp = 1; warp < kWarps; ++warp) {
    own = merge(own, of_warps[warp]);
  }
  return own;
}

/// Where a thread keeps its eight logits from column `c` on.
template <typename T>
__device__ T* kept(int64_t c) {
  extern __shared__ uint4 memory[];
  return reinterpret_cast<T*>(memory) + c;
}

/// Adds `count` logits from column `c` on.
template <bool kTerms, int kCount>
__device__ void add(const float (&x)[kCount], int64_t c, Softmax& own) {
  float largest = x[0];
#pragma unroll
  for (int j = 1; j < kCount; ++j) {
    largest = fmaxf(largest, x[j]);
  }
  if (largest > own.largest) {
    if constexpr (kTerms) {
      own.total = total_for(largest, own);
    }
    own.sum *= fast_exp(own.largest - largest);
    own.largest = largest;
#pragma unroll
    for (int j = kCount - 1; j >= 0; --j) {
      own.place = x[j] == largest ? static_cast<int>(c) + j : own.place;
    }
  }
  float total = 0;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    own.sum += fast_exp(x[j] - own.largest);
    total += x[j] - own.largest;
  }
  if constexpr (kTerms) {
    own.total += total;
    own.count += kCount;
  }
}

/// Reads whole vectors in front of `whole`, and the elements behind it one by one. Keeps those in
/// front of `num_kept`.
template <bool kTerms, typename T>
__device__ Softmax of_row(const T* row, int64_t whole, int64_t num_kept, int64_t vocab) {
  Softmax own;
  for (int64_t first = int64_t{threadIdx.x} * kVector; first < whole; first += kAhead * kStride) {
    Vector8<T> ahead[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (first + u * kStride < whole) {
        ahead[u].bits[0] = *reinterpret_cast<const uint4*>(row + first + u * kStride);
      }
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t c = first + u * kStride;
      if (c < whole) {
        float x[kVector];
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          x[j] = to_float(ahead[u].values[j]);
        }
        if (c < num_kept) {
          *reinterpret_cast<uint4*>(kept<T>(c)) = ahead[u].bits[0];
        }
        add<kTerms>(x, c, own);
      }
    }
  }
  if (const int64_t c = whole + threadIdx.x; c < vocab) {
    const float x[1] = {to_float(row[c])};
    add<kTerms>(x, c, own);
  }
  return own;
}

/// The gradient of a row: softmax * factor - spread, at the label another value.
struct RowGradient {
  float log_sum, at_label;
  float factor = 1;
  float spread = 0;
};

struct RowResult {
  float loss;
  RowGradient gradient;
};

/// With `kTerms` there is label smoothing or a z-loss.
template <bool kTerms>
__device__ RowResult finish_row(const HeadLogits& in, const Softmax& softmax, float of_label) {
  const float log_rest = logf(softmax.sum);
  const float log_sum = softmax.largest + log_rest;
  const float loss = softmax.largest - of_label + log_rest;  // log_sum would round a small loss off
  const float at_label = expm1f(-loss);  // near 1 a rounded probability would lose the difference
  if constexpr (!kTerms) {
    return {loss, {log_sum, at_label}};
  }
  const float smoothing = in.label_smoothing;
  const auto vocab = static_cast<float>(in.vocab);
  const float spread = smoothing / vocab, slope = 2 * in.z_loss * log_sum;
  const float mean_loss = log_rest - softmax.total / vocab;  // over all labels
  const float likelihood = expf(-loss);
  const float smooth = smoothing > 0 ? smoothing * mean_loss : 0;  // a logit may be -inf
  return {(1 - smoothing) * loss + smooth + in.z_loss * log_sum * log_sum,
          {log_sum,
           (1 - smoothing) * at_label + smoothing * (likelihood - 1 / vocab) + slope * likelihood,
           1 + slope, spread}};
}

/// Replaces the row's logits by their gradient, and the padding's by 0.
template <typename T>
__device__ void write_gradient(T* logits, int64_t whole, int64_t num_kept, const HeadLogits& in,
                               int64_t label, const RowGradient& gradient) {
  const auto of_logit = [&](float x) {
    return fast_exp(x - gradient.log_sum) * gradient.factor - gradient.spread;
  };
  const int64_t own = int64_t{threadIdx.x} * kVector;
#pragma unroll 4
  for (int64_t c = (whole - 1) / kStride * kStride + own; c >= 0; c -= kStride) {
    if (c >= whole) {
      continue;
    }
    float x[kVector];
    load8(c < num_kept ? kept<T>(c) : logits + c, 1, x);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      x[j] = of_logit(x[j]);
    }
    if (label >= c && label < c + kVector) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        x[j] = c + j == label ? gradient.at_label : x[j];
      }
    }
    store8(logits + c, 1, x);
  }
  for (int64_t c = whole + threadIdx.x; c < in.leading; c += kThreads) {
    const float x = c < in.vocab ? of_logit(to_float(logits[c])) : 0.0F;
    logits[c] = from_float<T>(c == label ? gradient.at_label : x);
  }
}

template <bool kTerms, typename T>
__global__ void __launch_bounds__(kThreads, 2)
    row_losses(HeadLogits in, int64_t num_kept, bool make_grad, HeadLossSums out) {
  const int64_t row = blockIdx.x;
  T* const logits = static_cast<T*>(in.logits) + row * in.leading;
  const int64_t whole = in.vocab / kVector * kVector;
  const int64_t label = in.labels[row];
  if (label == in.ignore_index) {
    if (threadIdx.x == 0) {
      out.row_losses[row] = 0;
      out.row_marks[row] = 0;
    }
    constexpr float kZeros[kVector] = {};
    for (int64_t c = int64_t{threadIdx.x} * kVector; make_grad && c < in.leading; c += kStride) {
      store8(logits + c, 1, kZeros);
    }
    return;
  }
  const bool is_valid = label >= 0 && label < in.vocab;
  const float of_label = is_valid ? to_float(logits[label]) : kNan;
  // of_block() also orders the readers of the label's logit before its writer.
  auto softmax = of_block(of_row<kTerms>(logits, whole, num_kept, in.vocab));
  softmax.sum = is_valid ? softmax.sum : kNan;  // found by checks of loss and gradients
  const auto [loss, gradient] = finish_row<kTerms>(in, softmax, of_label);
  if (threadIdx.x == 0) {
    out.row_losses[row] = loss;
    out.row_marks[row] = softmax.place == label && !isnan(loss) ? 1 : 0;
  }
  if (make_grad) {
    write_gradient(logits, whole, num_kept, in, label, gradient);
  }
}

/// One block, in a fixed order.
__global__ void add_rows(int64_t rows, HeadLossSums out) {
  __shared__ float losses[kThreads];
  __shared__ int marks[kThreads];
  float loss = 0;
  int correct = 0;
  for (int64_t row = threadIdx.x; row < rows; row += kThreads) {
    loss += out.row_losses[row];
    correct += out.row_marks[row];
  }
  losses[threadIdx.x] = loss;
  marks[threadIdx.x] = correct;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      losses[threadIdx.x] += losses[threadIdx.x + half];
      marks[threadIdx.x] += marks[threadIdx.x + half];
    }
  }
  if (threadIdx.x == 0) {
    *out.loss += losses[0];
    *out.num_correct += marks[0];
  }
}

/// The bytes of a row of `bytes` that a block of this device keeps.
int64_t kept_bytes(int64_t bytes) {
  constexpr int64_t kOwnBytes = 1024;  // the block's other variables
  int device = 0, limit = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess) {
    return 0;
  }
  return std::min({bytes, kMaxKeptBytes, limit - kOwnBytes}) / 16 * 16;
}

}  // namespace

cudaError_t launch_head_loss(const HeadLogits& in, bool make_grad, const HeadLossSums& out,
                             cudaStream_t stream) {
  if (in.rows == 0) {
    return cudaSuccess;
  }
  return with_compute_type(in.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto kernel =
        in.label_smoothing > 0 || in.z_loss > 0 ? row_losses<true, T> : row_losses<false, T>;
    const auto blocks = static_cast<unsigned>(in.rows);
    const int64_t bytes = make_grad ? kept_bytes(in.leading * static_cast<int64_t>(sizeof(T))) : 0;
    const auto status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(bytes));
    if (status != cudaSuccess) {
      return status;
    }
    kernel<<<blocks, kThreads, static_cast<size_t>(bytes), stream>>>(
        in, bytes / static_cast<int64_t>(sizeof(T)), make_grad, out);
    add_rows<<<1, kThreads, 0, stream>>>(in.rows, out);
    return cudaGetLastError();
  });
}

}  // namespace ddp::ops::detail
