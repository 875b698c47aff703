// SPDX-License-Identifier: Apache-2.0
#include "optim/flat_kernels.hpp"
#include "optim/flat_memory.cuh"
#include "optim/flat_sums.cuh"

namespace ddp::detail {
namespace {

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
      }
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

}  // namespace

cudaError_t launch_flat_update(const FlatStep& step, const FlatGradients& gradients,
                               cudaStream_t stream) {
  if (step.rule.counts()) {
    const int blocks = (gradients.num_segments + kFlatThreads - 1) / kFlatThreads;
    flat_count_updates<<<blocks, kFlatThreads, 0, stream>>>(step, gradients);
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

}  // namespace ddp::detail
