// SPDX-License-Identifier: Apache-2.0
#include "optim/flat/kernels.hpp"
#include "optim/flat/memory.cuh"

namespace ddp::detail {
namespace {

/// The sum over the block's kFlatThreads threads, in thread 0. May be called repeatedly.
template <typename T>
__device__ __forceinline__ T sum_over_block(T value) {
  __shared__ T sums[kFlatThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_down_sync(0xffffffffU, value, distance);
  }
  __syncthreads();  // wait until an earlier call's sums are read
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = value;
  }
  __syncthreads();
  T sum = 0;
#pragma unroll
  for (int warp = 0; warp < kFlatThreads / 32; ++warp) {
    sum += sums[warp];
  }
  return sum;
}

// A thread's elements of one chunk.
struct Place {
  int64_t index;
  bool inside;
  bool whole;  // four elements can be moved at once
};

__device__ __forceinline__ Place place_of(const FlatChunk& chunk, int vector,
                                          const FlatSegment& segment, bool aligned) {
  const int64_t index = static_cast<int64_t>(chunk.index) * kFlatChunk +
                        (vector * kFlatThreads + static_cast<int>(threadIdx.x)) * 4;
  return {index, index < segment.numel, aligned && index + 4 <= segment.numel};
}

// Calls body(k, own slots) for the four elements and stores the slots that it changes.
template <typename Rule, typename Body>
__device__ __forceinline__ void for_each_of_four(float4 (&slots)[kFlatMaxSlots], Body body) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float own[kFlatMaxSlots];
#pragma unroll
    for (int slot = 0; slot < Rule::kSlots; ++slot) {
      own[slot] = (&slots[slot].x)[k];
    }
    body(k, own);
#pragma unroll
    for (int slot = 0; slot < Rule::kSlots; ++slot) {
      (&slots[slot].x)[k] = own[slot];
    }
  }
}

template <typename Rule>
__device__ __forceinline__ void write_slots(const FlatSegment& segment, const Place& place,
                                            const float4 (&slots)[kFlatMaxSlots]) {
#pragma unroll
  for (int slot = 0; slot < Rule::kSlots; ++slot) {
    write_float4(segment.slots[slot], place.whole, place.index, segment.numel, slots[slot]);
  }
}

// A thread's inputs from its chunk. All loads are in flight before the first store, to saturate the
// memory bandwidth.
template <typename Rule, bool ReadsGradient>
struct Elements {
  float4 gradient[kFlatVectors];
  float4 weight[kFlatVectors];
  float4 slots[kFlatVectors][kFlatMaxSlots];
  uint2 leaf[kFlatVectors];

  __device__ __forceinline__ void read(const FlatChunk& chunk, const FlatSegment& segment,
                                       const void* data, FlatDtype dtype, bool aligned) {
#pragma unroll
    for (int v = 0; v < kFlatVectors; ++v) {
      const Place place = place_of(chunk, v, segment, aligned);
      if (place.inside) {
        if constexpr (ReadsGradient) {
          gradient[v] = read_gradient(data, dtype, place.whole, place.index, segment.numel);
        } else {
          gradient[v] = {};
        }
        weight[v] = read_float4(segment.weight, place.whole, place.index, segment.numel);
#pragma unroll
        for (int slot = 0; slot < Rule::kSlots; ++slot) {
          slots[v][slot] =
              read_float4(segment.slots[slot], place.whole, place.index, segment.numel);
        }
        if (segment.leaf != nullptr) {
          leaf[v] = read_half4(segment.leaf, place.whole, place.index, segment.numel);
        }
      }
    }
  }

  /// Call after read(): a comparison between its loads would wait for each.
  __device__ __forceinline__ void sync_master_from_parameter(int v, const FlatSegment& segment) {
    if (segment.leaf != nullptr) {
      weight[v] = master_of(segment.leaf_dtype, weight[v], leaf[v]);
    }
  }
};

// One block per chunk.
template <typename Rule>
__global__ void __launch_bounds__(kFlatThreads)
    flat_update(const __grid_constant__ FlatStep step,
                const __grid_constant__ FlatGradients gradients) {
  const FlatChunk chunk = step.chunks[gradients.first_chunk + static_cast<int>(blockIdx.x)];
  const int local = chunk.segment - gradients.first_segment;
  const void* const data = gradients.data[local];
  if (data == nullptr || step.found_inf.get() != 0.0F) {
    return;
  }
  const FlatSegment segment = step.segments[chunk.segment];
  const bool aligned = segment.aligned && gradients.aligned[local];
  const FlatFactors factors = flat_factors(step, segment, chunk.segment);
  Elements<Rule, Rule::kApplyReadsGradient> own;
  own.read(chunk, segment, data, gradients.dtype[local], aligned);
#pragma unroll
  for (int v = 0; v < kFlatVectors; ++v) {
    const Place place = place_of(chunk, v, segment, aligned);
    if (place.inside) {
      own.sync_master_from_parameter(v, segment);
      for_each_of_four<Rule>(own.slots[v], [&](int k, float* slots) {
        Rule::apply(step.rule, factors, (&own.gradient[v].x)[k], (&own.weight[v].x)[k], slots);
      });
      write_float4(segment.weight, place.whole, place.index, segment.numel, own.weight[v]);
      if constexpr (Rule::kApplyWritesSlots) {
        write_slots<Rule>(segment, place, own.slots[v]);
      }
      if (segment.leaf != nullptr) {
        write_leaf(segment, place.whole, place.index, own.weight[v]);
      }
    }
  }
}

// One block per chunk: the sums of squares for the trust ratios.
template <typename Rule>
__global__ void __launch_bounds__(kFlatThreads)
    flat_measure(const __grid_constant__ FlatStep step,
                 const __grid_constant__ FlatGradients gradients) {
  const FlatChunk chunk = step.chunks[gradients.first_chunk + static_cast<int>(blockIdx.x)];
  const int local = chunk.segment - gradients.first_segment;
  const void* const data = gradients.data[local];
  if (data == nullptr || step.found_inf.get() != 0.0F) {
    return;
  }
  const FlatSegment segment = step.segments[chunk.segment];
  const bool aligned = segment.aligned && gradients.aligned[local];
  const FlatFactors factors = flat_factors(step, segment, chunk.segment);
  Elements<Rule, true> own;
  own.read(chunk, segment, data, gradients.dtype[local], aligned);
  FlatSquares squares;
#pragma unroll
  for (int v = 0; v < kFlatVectors; ++v) {
    const Place place = place_of(chunk, v, segment, aligned);
    if (place.inside) {
      own.sync_master_from_parameter(v, segment);
      for_each_of_four<Rule>(own.slots[v], [&](int k, float* slots) {
        const double weight = (&own.weight[v].x)[k];
        const double update = Rule::measure(step.rule, factors, (&own.gradient[v].x)[k],
                                            (&own.weight[v].x)[k], slots);
        if (place.index + k < segment.numel) {  // past the end LAMB with eps 0 divides 0 by 0
          squares.weight += weight * weight;
          squares.update += update * update;
        }
      });
      if constexpr (Rule::kMeasureWritesSlots) {
        write_slots<Rule>(segment, place, own.slots[v]);
      }
    }
  }
  squares.weight = sum_over_block(squares.weight);
  squares.update = sum_over_block(squares.update);
  if (threadIdx.x == 0) {
    step.squares[segment.first_chunk + chunk.index] = squares;
  }
}

// One block per segment.
__global__ void __launch_bounds__(kFlatThreads)
    flat_trust_ratios(const __grid_constant__ FlatStep step,
                      const __grid_constant__ FlatGradients gradients) {
  const int local = static_cast<int>(blockIdx.x);
  if (gradients.data[local] == nullptr || step.found_inf.get() != 0.0F) {
    return;
  }
  const int index = gradients.first_segment + local;
  const FlatSegment& segment = step.segments[index];
  const auto num_chunks = static_cast<int>((segment.numel + kFlatChunk - 1) / kFlatChunk);
  double weight = 0.0;
  double update = 0.0;
  for (int c = static_cast<int>(threadIdx.x); c < num_chunks; c += kFlatThreads) {
    const FlatSquares squares = step.squares[segment.first_chunk + c];
    weight += squares.weight;
    update += squares.update;
  }
  weight = sum_over_block(weight);
  update = sum_over_block(update);
  if (threadIdx.x == 0) {
    flat_trust(step, index, weight, update);
  }
}

// One thread per segment. A skipped step is not counted.
__global__ void flat_count_updates(const __grid_constant__ FlatStep step,
                                   const __grid_constant__ FlatGradients gradients) {
  const int local = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (local < gradients.num_segments && gradients.data[local] != nullptr &&
      step.found_inf.get() == 0.0F) {
    flat_count(step, gradients.first_segment + local);
  }
}

// One block per chunk.
__global__ void __launch_bounds__(kFlatThreads)
    flat_scan(const __grid_constant__ FlatScan scan,
              const __grid_constant__ FlatGradients gradients) {
  const int index = gradients.first_chunk + static_cast<int>(blockIdx.x);
  const FlatChunk chunk = scan.chunks[index];
  const int local = chunk.segment - gradients.first_segment;
  const void* const data = gradients.data[local];
  const int64_t numel = data == nullptr ? 0 : scan.segments[chunk.segment].numel;
  const float inverse_scale = scan.inverse_scale.get();
  const int64_t begin = static_cast<int64_t>(chunk.index) * kFlatChunk + threadIdx.x * 4;
  float4 gradient[kFlatVectors];
#pragma unroll
  for (int v = 0; v < kFlatVectors; ++v) {
    const int64_t i = begin + v * kFlatThreads * 4;
    gradient[v] = {};
    if (i < numel) {
      gradient[v] = read_gradient(data, gradients.dtype[local],
                                  gradients.aligned[local] && i + 4 <= numel, i, numel);
    }
  }
  double sum = 0.0;
  bool finite = true;
#pragma unroll
  for (int v = 0; v < kFlatVectors; ++v) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float value = (&gradient[v].x)[k];
      finite = finite && flat_is_finite(value);
      const double scaled = value * inverse_scale;
      sum += scaled * scaled;
    }
  }
  sum = sum_over_block(sum);
  const bool all_finite = __syncthreads_and(finite ? 1 : 0) != 0;
  if (threadIdx.x == 0) {
    scan.sums[index] = sum;
    scan.bad[index] = all_finite ? 0 : 1;
  }
}

// One block.
__global__ void __launch_bounds__(kFlatThreads)
    flat_scan_end(const __grid_constant__ FlatScan scan) {
  double square = 0.0;
  int first_bad = scan.num_chunks;
  for (int c = static_cast<int>(threadIdx.x); c < scan.num_chunks; c += kFlatThreads) {
    square += scan.sums[c];
    if (scan.bad[c] != 0 && c < first_bad) {
      first_bad = c;
    }
  }
  square = sum_over_block(square);
  __shared__ int first;
  if (threadIdx.x == 0) {
    first = scan.num_chunks;
  }
  __syncthreads();
  atomicMin(&first, first_bad);  // integers: the same in every order
  __syncthreads();
  if (threadIdx.x == 0) {
    flat_conclude(scan, square, first < scan.num_chunks ? scan.chunks[first].segment : -1);
  }
}

// One block per chunk.
__global__ void __launch_bounds__(kFlatThreads)
    flat_average(const FlatAverage* averages, const FlatChunk* chunks, float share) {
  const FlatChunk chunk = chunks[blockIdx.x];
  const FlatAverage entry = averages[chunk.segment];
  const int64_t begin = static_cast<int64_t>(chunk.index) * kFlatChunk + threadIdx.x * 4;
  float4 average[kFlatVectors];
  float4 weight[kFlatVectors];
#pragma unroll
  for (int v = 0; v < kFlatVectors; ++v) {
    const int64_t i = begin + v * kFlatThreads * 4;
    if (i < entry.numel) {
      const bool whole = entry.aligned && i + 4 <= entry.numel;
      average[v] = read_float4(entry.average, whole, i, entry.numel);
      weight[v] = read_gradient(entry.weight, entry.dtype, whole, i, entry.numel);
    }
  }
#pragma unroll
  for (int v = 0; v < kFlatVectors; ++v) {
    const int64_t i = begin + v * kFlatThreads * 4;
    if (i < entry.numel) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float& value = (&average[v].x)[k];
        value = flat_lerp(value, (&weight[v].x)[k], share);
      }
      write_float4(entry.average, entry.aligned && i + 4 <= entry.numel, i, entry.numel,
                   average[v]);
    }
  }
}

}  // namespace

cudaError_t launch_flat_update(const FlatStep& step, const FlatGradients& gradients,
                               cudaStream_t stream) {
  if (step.rule.counts()) {
    const int blocks = (gradients.num_segments + kFlatThreads - 1) / kFlatThreads;
    flat_count_updates<<<blocks, kFlatThreads, 0, stream>>>(step, gradients);
  }
  if (gradients.num_chunks == 0) {
    return cudaGetLastError();  // empty parameters only count their updates
  }
  with_flat_rule(step.rule, [&](auto rule) {
    using Rule = decltype(rule);
    if constexpr (Rule::kMeasures) {
      flat_measure<Rule><<<gradients.num_chunks, kFlatThreads, 0, stream>>>(step, gradients);
      flat_trust_ratios<<<gradients.num_segments, kFlatThreads, 0, stream>>>(step, gradients);
    }
    flat_update<Rule><<<gradients.num_chunks, kFlatThreads, 0, stream>>>(step, gradients);
  });
  return cudaGetLastError();
}

cudaError_t launch_flat_scan(const FlatScan& scan, const FlatGradients& gradients,
                             cudaStream_t stream) {
  flat_scan<<<gradients.num_chunks, kFlatThreads, 0, stream>>>(scan, gradients);
  return cudaGetLastError();
}

cudaError_t launch_flat_scan_end(const FlatScan& scan, cudaStream_t stream) {
  flat_scan_end<<<1, kFlatThreads, 0, stream>>>(scan);
  return cudaGetLastError();
}

cudaError_t launch_flat_average(const FlatAverage* averages, const FlatChunk* chunks,
                                int num_chunks, float share, cudaStream_t stream) {
  flat_average<<<num_chunks, kFlatThreads, 0, stream>>>(averages, chunks, share);
  return cudaGetLastError();
}

}  // namespace ddp::detail
