// SPDX-License-Identifier: Apache-2.0
#include <math_constants.h>

#include "ops/kernel_types.cuh"
#include "ops/language/cross_entropy_kernels.hpp"

namespace ddp::ops::detail {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kMaxBlockThreads = 1024;
// Up to this many classes (and kMaxBlockThreads rows) one block does everything, one thread per
// row.
constexpr int kMaxThreadClasses = 32;

constexpr int kCounted = 1;
constexpr int kRight = 2;

struct Row {
  float loss;
  float log_sum;
  int mark;
};

/// A row's results from its maximum, the maximum's first place, and the sums of exp(x - maximum)
/// over all other places and of x - maximum. Differences from the maximum keep the digits of a
/// small loss, which differences of logits from a logsumexp would lose.
template <typename T>
__device__ Row finish_row(const CrossEntropyRows& in, int row, float maximum, int place,
                          float others, float differences) {
  const int64_t label = in.labels[row];
  // The first summand is 0, but NaN if the maximum is infinite.
  const float log_sum = log1pf((maximum - maximum) + others);
  if (label == in.ignore_index) {
    return {0.0F, log_sum, 0};
  }
  if (label < 0 || label >= in.classes) {
    return {CUDART_NAN_F, log_sum, kCounted};
  }
  const T* logits = static_cast<const T*>(in.logits) + int64_t{row} * in.classes;
  const float smoothing = in.label_smoothing;
  // -sum_c log p_c / classes = log_sum - mean(x - maximum)
  const float spread = log_sum - differences / static_cast<float>(in.classes);
  const float loss = (1.0F - smoothing) * (log_sum - (to_float(logits[label]) - maximum)) +
                     (smoothing > 0.0F ? smoothing * spread : 0.0F);
  // A row with NaN or infinity is never correct, whatever the position of its maximum.
  const bool right = place == label && !isnan(log_sum);
  return {loss, log_sum, kCounted + (right ? kRight : 0)};
}

struct Totals {
  float loss;
  int counted, correct;
};

/// Sums over a block in a fixed order; only thread 0 gets the result.
__device__ Totals block_totals(Totals own) {
  __shared__ Totals of_warps[kMaxBlockThreads / kWarp];
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    own.loss += __shfl_down_sync(~0U, own.loss, offset);
    own.counted += __shfl_down_sync(~0U, own.counted, offset);
    own.correct += __shfl_down_sync(~0U, own.correct, offset);
  }
  if (threadIdx.x % kWarp == 0) {
    of_warps[threadIdx.x / kWarp] = own;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp) {
      own.loss += of_warps[warp].loss;
      own.counted += of_warps[warp].counted;
      own.correct += of_warps[warp].correct;
    }
  }
  return own;
}

__device__ void write_totals(const Totals& totals, const CrossEntropySums& out) {
  const float inverse = 1.0F / static_cast<float>(totals.counted);
  *out.inverse_count = inverse;
  *out.loss = totals.loss / static_cast<float>(totals.counted);
  *out.num_correct = totals.correct;
}

template <typename T>
__global__ void one_block(CrossEntropyRows in, CrossEntropySums out) {
  Totals totals{};
  const int row = static_cast<int>(threadIdx.x);
  if (row < in.rows) {
    const T* logits = static_cast<const T*>(in.logits) + row * in.classes;
    float maximum = -CUDART_INF_F;
    int place = 0;
#pragma unroll 8
    for (int c = 0; c < in.classes; ++c) {
      const float x = to_float(logits[c]);
      if (x > maximum) {
        maximum = x;
        place = c;
      }
    }
    float others = 0, differences = 0;
#pragma unroll 8
    for (int c = 0; c < in.classes; ++c) {
      const float difference = to_float(logits[c]) - maximum;
      others += c == place ? 0.0F : expf(difference);
      differences += difference;
    }
    const Row done = finish_row<T>(in, row, maximum, place, others, differences);
    out.maxima[row] = maximum;
    out.log_sums[row] = done.log_sum;
    totals = {done.loss, done.mark & kCounted, done.mark / kRight};
  }
  totals = block_totals(totals);
  if (threadIdx.x == 0) {
    write_totals(totals, out);
  }
}

/// One warp per row.
template <typename T>
__global__ void row_losses(CrossEntropyRows in, CrossEntropySums out) {
  const int row = static_cast<int>((blockIdx.x * kThreads + threadIdx.x) / kWarp);
  const int lane = threadIdx.x % kWarp;
  if (row >= in.rows) {
    return;
  }
  const T* logits = static_cast<const T*>(in.logits) + int64_t{row} * in.classes;
  float maximum = -CUDART_INF_F;
  int place = in.classes;
  for (int c = lane; c < in.classes; c += kWarp) {
    const float x = to_float(logits[c]);
    if (x > maximum) {
      maximum = x;
      place = c;
    }
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(~0U, maximum, offset);
    const int other_place = __shfl_xor_sync(~0U, place, offset);
    if (other > maximum || (other == maximum && other_place < place)) {
      maximum = other;
      place = other_place;
    }
  }
  float others = 0, differences = 0;
  for (int c = lane; c < in.classes; c += kWarp) {
    const float difference = to_float(logits[c]) - maximum;
    others += c == place ? 0.0F : expf(difference);
    differences += difference;
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    others += __shfl_xor_sync(~0U, others, offset);
    differences += __shfl_xor_sync(~0U, differences, offset);
  }
  if (lane == 0) {
    const Row done = finish_row<T>(in, row, maximum, place, others, differences);
    out.maxima[row] = maximum;
    out.log_sums[row] = done.log_sum;
    out.row_losses[row] = done.loss;
    out.row_marks[row] = done.mark;
  }
}

__global__ void add_rows(int rows, CrossEntropySums out) {
  Totals totals{};
  for (int row = static_cast<int>(threadIdx.x); row < rows; row += kMaxBlockThreads) {
    totals.loss += out.row_losses[row];
    totals.counted += out.row_marks[row] & kCounted;
    totals.correct += out.row_marks[row] / kRight;
  }
  totals = block_totals(totals);
  if (threadIdx.x == 0) {
    write_totals(totals, out);
  }
}

template <typename T>
__global__ void backward(CrossEntropyRows in, const float* maxima, const float* log_sums,
                         const float* inverse_count, const float* grad_loss, T* grad) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= int64_t{in.rows} * in.classes) {
    return;
  }
  const int64_t row = index / in.classes;
  const int64_t label = in.labels[row];
  float value = 0;
  if (label != in.ignore_index && (label < 0 || label >= in.classes)) {
    value = CUDART_NAN_F;  // as the loss, so that checks of gradients detect it
  } else if (label != in.ignore_index) {
    const float log_p =
        (to_float(static_cast<const T*>(in.logits)[index]) - maxima[row]) - log_sums[row];
    // Near 1, p - 1 would lose the digits that expm1 keeps.
    const bool at_label = index - row * in.classes == label;
    const float difference = at_label ? expm1f(log_p) + in.label_smoothing : expf(log_p);
    const float spread = in.label_smoothing / static_cast<float>(in.classes);
    value = (difference - spread) * (*grad_loss * *inverse_count);
  }
  grad[index] = from_float<T>(value);
}

}  // namespace

cudaError_t launch_cross_entropy(const CrossEntropyRows& in, const CrossEntropySums& out,
                                 cudaStream_t stream) {
  return with_float_type(in.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (in.rows <= kMaxBlockThreads && in.classes <= kMaxThreadClasses) {
      const int threads = (in.rows + kWarp - 1) / kWarp * kWarp;
      one_block<T><<<1, threads, 0, stream>>>(in, out);
    } else {
      row_losses<T>
          <<<num_blocks(int64_t{in.rows} * kWarp, kThreads), kThreads, 0, stream>>>(in, out);
      add_rows<<<1, kMaxBlockThreads, 0, stream>>>(in.rows, out);
    }
    return cudaGetLastError();
  });
}

cudaError_t launch_cross_entropy_backward(const CrossEntropyRows& in, const float* maxima,
                                          const float* log_sums, const float* inverse_count,
                                          const float* grad_loss, void* grad, cudaStream_t stream) {
  return with_float_type(in.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    backward<T><<<num_blocks(int64_t{in.rows} * in.classes, kThreads), kThreads, 0, stream>>>(
        in, maxima, log_sums, inverse_count, grad_loss, static_cast<T*>(grad));
    return cudaGetLastError();
  });
}

}  // namespace ddp::ops::detail
