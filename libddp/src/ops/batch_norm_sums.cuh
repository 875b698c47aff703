// SPDX-License-Identifier: Apache-2.0
// Sums over a grid in a fixed order: each block writes its own to a row of the partials, and the
// rows are added in the order of the blocks once all are there.
#pragma once

#include "ops/batch_norm_kernels.hpp"

namespace ddp::ops::detail {

constexpr int kThreads = 512;
constexpr int kBlocksPerSm = 2;
constexpr int kWarps = kThreads / 32;
// Vectors of a row that a block takes. Where it sums, 128 bytes, a cache line: wider slices leave
// more partials to each of fewer last blocks. Elsewhere longer rows are faster.
constexpr int kSumsSlice = 8;
constexpr int kMapSlice = 32;
constexpr int kOneInput = 4;    // rows a thread loads before it uses the first, where a row
constexpr int kMoreInputs = 2;  // is one vector, and where it is two or more

/// Adds a block's sums and writes them to its row of the partials, [kSums, channels of the slice].
template <int kSums>
__device__ void write_partials(const float (&sums)[kSums][8], int slice, float* shared,
                               float* partials) {
  const int width = 8 * slice;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float value = sums[k][i];
      for (int offset = 16; offset >= slice; offset >>= 1) {
        value += __shfl_xor_sync(~0u, value, offset);
      }
      if (lane < slice) {
        shared[(warp * kSums + k) * width + 8 * lane + i] = value;
      }
    }
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < kSums * width) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      total += shared[w * kSums * width + threadIdx.x];
    }
    partials[threadIdx.x] = total;
  }
}

/// In the last block: adds the rows of all blocks in their order. Thread t < channels of the slice
/// gets its channel's totals.
template <int kSums>
__device__ void add_partials(int slice, double* shared, const float* partials,
                             double (&totals)[kSums]) {
  const int width = 8 * slice;
  const int columns = kSums * width / 4;  // of four floats
  const int groups = kThreads / columns;
  const int group = threadIdx.x / columns, column = threadIdx.x % columns;
  const int blocks = static_cast<int>(gridDim.x);
  double mine[4] = {};
  if (group < groups) {
    const auto* rows = reinterpret_cast<const float4*>(partials) + column;
    constexpr int kInFlight = 8;
    for (int first = group; first < blocks; first += kInFlight * groups) {
      float4 values[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int block = first + j * groups;
        values[j] = block < blocks ? __ldcg(rows + static_cast<size_t>(block) * columns)
                                   : make_float4(0, 0, 0, 0);
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        mine[0] += values[j].x, mine[1] += values[j].y;
        mine[2] += values[j].z, mine[3] += values[j].w;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      shared[4 * threadIdx.x + i] = mine[i];
    }
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < width) {
    for (int k = 0; k < kSums; ++k) {
      double total = 0;
      for (int g = 0; g < groups; ++g) {
        total += shared[g * 4 * columns + k * width + threadIdx.x];
      }
      totals[k] = total;
    }
  }
}

/// Shared memory of a reduction: of floats, a row of sums from each warp; of doubles, four columns
/// of each thread.
template <int kSums>
struct ReductionMemory {
  double values[4 * kThreads];
  bool last;
  static_assert(kWarps * kSums * 8 * kSumsSlice * sizeof(float) <= sizeof(values));
  static_assert(kSums * 8 * kSumsSlice <= kThreads);
};

/// This slice's rows of the partials, and this block's among them.
template <int kSums>
struct SlicePartials {
  float* slice;
  float* block;

  __device__ SlicePartials(const BatchNormGrid& grid, const ReductionScratch& scratch) {
    const size_t row_floats = static_cast<size_t>(kSums) * 8 * grid.slice;
    slice = scratch.partials + blockIdx.y * gridDim.x * row_floats;
    block = slice + blockIdx.x * row_floats;
  }
};

/// The slice's sums over the whole grid. True in one block of the slice, where thread t < channels
/// of the slice holds the totals of its channel; the other blocks are done.
template <int kSums>
__device__ bool grid_sums(const float (&sums)[kSums][8], const BatchNormGrid& grid,
                          const ReductionScratch& scratch, double (&totals)[kSums]) {
  __shared__ ReductionMemory<kSums> memory;
  const SlicePartials<kSums> partials(grid, scratch);
  write_partials<kSums>(sums, grid.slice, reinterpret_cast<float*>(memory.values), partials.block);
  // Each thread's partials must be seen before the ticket that announces them.
  __threadfence();
  __syncthreads();
  unsigned* arrived = scratch.tickets + 2 * blockIdx.y;
  if (threadIdx.x == 0) {
    memory.last = atomicAdd(arrived, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!memory.last) {
    return false;
  }
  __threadfence();
  add_partials<kSums>(grid.slice, memory.values, partials.slice, totals);
  if (threadIdx.x == 0) {
    *arrived = 0;  // ready for the next kernel of the stream
  }
  return true;
}

/// As grid_sums, but in every block of the slice: each waits for all others, which must be
/// resident.
template <int kSums>
__device__ void grid_sums_everywhere(const float (&sums)[kSums][8], const BatchNormGrid& grid,
                                     const ReductionScratch& scratch, double (&totals)[kSums]) {
  __shared__ ReductionMemory<kSums> memory;
  const SlicePartials<kSums> partials(grid, scratch);
  write_partials<kSums>(sums, grid.slice, reinterpret_cast<float*>(memory.values), partials.block);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned* arrived = scratch.tickets + 2 * blockIdx.y;
    volatile unsigned* rounds = arrived + 1;
    const unsigned round = *rounds;  // cannot change before this block arrives
    __threadfence();
    if (atomicAdd(arrived, 1u) == gridDim.x - 1) {
      *arrived = 0;
      __threadfence();
      *rounds = round + 1;
    } else {
      while (*rounds == round) {
      }
    }
    __threadfence();
  }
  __syncthreads();
  add_partials<kSums>(grid.slice, memory.values, partials.slice, totals);
}

}  // namespace ddp::ops::detail
