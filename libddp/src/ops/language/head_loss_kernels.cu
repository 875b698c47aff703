// SPDX-License-Identifier: Apache-2.0
// Memory moves one read and one write of each logit. A block keeps its row in shared memory if two
// blocks' rows fit a multiprocessor; a longer row is read again, mostly from the L2 cache.
#include "ops/language/head_loss_kernels.hpp"

#include <limits>

#include "ops/kernel_types.cuh"

namespace ddp::ops::detail {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kVector = 8;
constexpr int64_t kMaxKeptBytes = 112 * 1024;  // of a row
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// The largest logit, its first place, and the sum of exp(x - largest).
struct Softmax {
  float largest = -kInfinity;
  float sum = 0;
  int place = std::numeric_limits<int>::max();
};

__device__ Softmax merge(const Softmax& a, const Softmax& b) {
  const bool takes_b = b.largest > a.largest || (b.largest == a.largest && b.place < a.place);
  const float largest = takes_b ? b.largest : a.largest;
  const auto scaled = [largest](const Softmax& part) {
    // Parts that saw nothing but -inf add nothing. NaN stays.
    return part.largest == -kInfinity && part.sum == 0.0F
               ? 0.0F
               : part.sum * __expf(part.largest - largest);
  };
  return {largest, scaled(a) + scaled(b), takes_b ? b.place : a.place};
}

__device__ Softmax of_block(Softmax own) {
  __shared__ Softmax of_warps[kWarps];
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    own = merge(own,
                {__shfl_xor_sync(~0U, own.largest, offset), __shfl_xor_sync(~0U, own.sum, offset),
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

template <typename T, bool kKeeps>
__device__ Softmax of_row(const T* row, int64_t vocab) {
  Softmax own;
  for (int64_t c = int64_t{threadIdx.x} * kVector; c < vocab; c += kThreads * kVector) {
    float x[kVector];
    load8(row + c, 1, x);
    if constexpr (kKeeps) {
      store8(kept<T>(c), 1, x);
    }
    float largest = -kInfinity;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      x[j] = c + j < vocab ? x[j] : -kInfinity;
      largest = fmaxf(largest, x[j]);
    }
    if (largest > own.largest) {
      own.sum *= __expf(own.largest - largest);
      own.largest = largest;
#pragma unroll
      for (int j = kVector - 1; j >= 0; --j) {
        own.place = x[j] == largest ? static_cast<int>(c) + j : own.place;
      }
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      // A difference of two -inf would be NaN.
      own.sum += x[j] == -kInfinity ? 0.0F : __expf(x[j] - own.largest);
    }
  }
  return own;
}

template <typename T, bool kKeeps>
__global__ void __launch_bounds__(kThreads, 2)
    row_losses(HeadLogits in, bool make_grad, HeadLossSums out) {
  const int64_t row = blockIdx.x;
  T* const logits = static_cast<T*>(in.logits) + row * in.leading;
  const int64_t label = in.labels[row];
  const bool counts = label != in.ignore_index;
  const bool is_valid = counts && label >= 0 && label < in.vocab;
  const float of_label = is_valid ? to_float(logits[label]) : kNan;
  Softmax softmax;
  if (counts) {
    softmax = of_block(
        of_row<T, kKeeps>(logits, in.vocab));  // also orders the readers of the label's logit
  }
  const float log_sum = softmax.largest + logf(softmax.sum);
  const float loss = counts ? log_sum - of_label : 0.0F;
  if (threadIdx.x == 0) {
    out.row_losses[row] = loss;
    out.row_marks[row] = is_valid && softmax.place == label && !isnan(loss) ? 1 : 0;
  }
  if (!make_grad) {
    return;
  }
  const float bad = is_valid || !counts ? 0.0F : kNan;  // found by checks of gradients
  for (int64_t c = int64_t{threadIdx.x} * kVector; c < in.leading; c += kThreads * kVector) {
    float x[kVector] = {};
    if (counts && c < in.vocab) {
      load8(kKeeps ? kept<T>(c) : logits + c, 1, x);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        x[j] = c + j < in.vocab ? __expf(x[j] - log_sum) + bad : 0.0F;
        // Near 1 a rounded probability would lose the difference from 1.
        x[j] = c + j == label ? expm1f(-loss) : x[j];
      }
    }
    store8(logits + c, 1, x);
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

/// Whether a block of this device may have `bytes` of shared memory besides its own variables.
bool can_keep(int64_t bytes) {
  constexpr int64_t kOwnBytes = 1024;
  int device = 0, limit = 0;
  return bytes <= kMaxKeptBytes && cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) ==
             cudaSuccess &&
         bytes + kOwnBytes <= limit;
}

}  // namespace

cudaError_t launch_head_loss(const HeadLogits& in, bool make_grad, const HeadLossSums& out,
                             cudaStream_t stream) {
  if (in.rows == 0) {
    return cudaSuccess;
  }
  return with_compute_type(in.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto blocks = static_cast<unsigned>(in.rows);
    const int64_t bytes = in.leading * static_cast<int64_t>(sizeof(T));
    if (make_grad && can_keep(bytes)) {
      const auto size = static_cast<int>(bytes);
      const auto status = cudaFuncSetAttribute(row_losses<T, true>,
                                               cudaFuncAttributeMaxDynamicSharedMemorySize, size);
      if (status != cudaSuccess) {
        return status;
      }
      row_losses<T, true><<<blocks, kThreads, size, stream>>>(in, make_grad, out);
    } else {
      row_losses<T, false><<<blocks, kThreads, 0, stream>>>(in, make_grad, out);
    }
    add_rows<<<1, kThreads, 0, stream>>>(in.rows, out);
    return cudaGetLastError();
  });
}

}  // namespace ddp::ops::detail
