// SPDX-License-Identifier: Apache-2.0
// Sums over a grid in a fixed order: each block writes its sums to a row of the partials. Once all
// rows are complete, they are added in block order.
#pragma once

#include <cooperative_groups.h>

#include "ops/vision/batch_norm_kernels.hpp"

namespace ddp::ops::detail {

constexpr int kThreads = 512;
constexpr int kBlocksPerSm = 2;
constexpr int kWarps = kThreads / 32;
// Vectors of a row per block. Summing kernels use 128 bytes, a cache line: with wider slices fewer
// last blocks have more partials each. For other kernels longer rows are faster.
constexpr int kSumsSlice = 8;
constexpr int kMapSlice = 32;
constexpr int kOneInput = 4;    // rows a thread loads before it uses the first, where a row
constexpr int kMoreInputs = 2;  // is one vector, and where it is two or more

/// Shared memory of a block's reduction.
template <int kSums>
struct alignas(16) ReductionMemory {  // groups are written four at a time
  static constexpr int kColumns = kSums * 8 * kSumsSlice;
  static_assert(kColumns <= kThreads);
  union {
    float warps[kWarps * kColumns];  // sums per warp
    float groups[4 * kThreads];      // per thread, sums of four columns of the partials
  };
  double totals[kColumns];
  bool last;
};

/// One step of the sums over a warp: lanes kOffset apart exchange half of their values each, so
/// that each keeps kCount / 2. `first` is the number of the first value kept.
template <int kOffset, int kCount, int kValues>
__device__ void halve(float (&values)[kValues], int lane, int& first) {
  constexpr int kHalf = kCount / 2;
  const bool upper = (lane & kOffset) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float sent = upper ? values[i] : values[kHalf + i];
    const float kept = upper ? values[kHalf + i] : values[i];
    values[i] = kept + __shfl_xor_sync(~0u, sent, kOffset);
  }
  first += upper ? kHalf : 0;
}

/// Writes a warp's sums to its row [kSums, channels of the slice]. Lanes kSlice apart have the same
/// channels.
template <int kSlice, int kSums>
__device__ void write_warp_sums(const float (&sums)[kSums][8], int lane, float* row) {
  static_assert(kSlice == 4 || kSlice == 8);
  constexpr int kValues = 8 * kSums, kKept = kValues * kSlice / 32;
  float values[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    values[i] = sums[i / 8][i % 8];
  }
  int first = 0;
  halve<16, kValues>(values, lane, first);
  halve<8, kValues / 2>(values, lane, first);
  if constexpr (kSlice == 4) {
    halve<4, kValues / 4>(values, lane, first);
  }
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int value = first + i;
    row[value / 8 * 8 * kSlice + 8 * (lane % kSlice) + value % 8] = values[i];
  }
}

/// Same, for any slice.
template <int kSums>
__device__ void write_warp_sums(const float (&sums)[kSums][8], int slice, int lane, float* row) {
  for (int k = 0; k < kSums; ++k) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float value = sums[k][i];
      for (int offset = 16; offset >= slice; offset >>= 1) {
        value += __shfl_xor_sync(~0u, value, offset);
      }
      if (lane < slice) {
        row[(k * slice + lane) * 8 + i] = value;
      }
    }
  }
}

/// A block's sums, [kSums, channels of the slice]: thread t returns element t, if there is one.
template <int kSums>
__device__ float block_sum(const float (&sums)[kSums][8], int slice,
                           ReductionMemory<kSums>& memory) {
  const int columns = kSums * 8 * slice;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float* row = memory.warps + warp * columns;
  if (slice == 8) {
    write_warp_sums<8>(sums, lane, row);
  } else if (slice == 4) {
    write_warp_sums<4>(sums, lane, row);
  } else {
    write_warp_sums(sums, slice, lane, row);
  }
  __syncthreads();
  float total = 0;
  if (static_cast<int>(threadIdx.x) < columns) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      total += memory.warps[w * columns + threadIdx.x];
    }
  }
  return total;
}

/// Adds a block's sums and writes them to its row of the partials.
template <int kSums>
__device__ void write_partials(const float (&sums)[kSums][8], int slice,
                               ReductionMemory<kSums>& memory, float* partials) {
  const float total = block_sum(sums, slice, memory);
  if (static_cast<int>(threadIdx.x) < kSums * 8 * slice) {
    __stcg(partials + threadIdx.x, total);
  }
}

/// Adds the rows of all blocks in block order. Thread t < channels of the slice gets its channel's
/// totals.
template <int kSums>
__device__ void add_partials(int slice, ReductionMemory<kSums>& memory, const float* partials,
                             double (&totals)[kSums]) {
  const int width = 8 * slice, columns = kSums * width;
  const int blocks = static_cast<int>(gridDim.x);
  const int quads = columns / 4;
  const int groups = min(kThreads / quads, blocks);
  const int group = static_cast<int>(threadIdx.x) / quads;
  const int quad = static_cast<int>(threadIdx.x) % quads;
  if (group < groups) {
    const auto* rows = reinterpret_cast<const float4*>(partials) + quad;
    float4 mine = make_float4(0, 0, 0, 0);
    constexpr int kInFlight = 8;
    for (int first = group; first < blocks; first += kInFlight * groups) {
      float4 values[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int block = first + j * groups;
        values[j] = block < blocks ? __ldcg(rows + static_cast<size_t>(block) * quads)
                                   : make_float4(0, 0, 0, 0);
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        mine.x += values[j].x, mine.y += values[j].y;
        mine.z += values[j].z, mine.w += values[j].w;
      }
    }
    reinterpret_cast<float4*>(memory.groups)[group * quads + quad] = mine;
  }
  __syncthreads();
  const int place = static_cast<int>(threadIdx.x);
  if (place < columns) {
    double total = 0;
#pragma unroll 8
    for (int g = 0; g < groups; ++g) {
      total += memory.groups[g * columns + place];
    }
    memory.totals[place] = total;
  }
  __syncthreads();
  if (place < width) {
    for (int k = 0; k < kSums; ++k) {
      totals[k] = memory.totals[k * width + place];
    }
  }
}

/// This slice's rows of the partials, and this block's row.
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

/// The slice's sums over the whole grid. Returns true in one block of the slice, where thread t <
/// channels of the slice holds its channel's totals. The other blocks are done.
template <int kSums>
__device__ bool grid_sums(const float (&sums)[kSums][8], const BatchNormGrid& grid,
                          const ReductionScratch& scratch, double (&totals)[kSums]) {
  __shared__ ReductionMemory<kSums> memory;
  const SlicePartials<kSums> partials(grid, scratch);
  write_partials(sums, grid.slice, memory, partials.block);
  __syncthreads();
  unsigned* arrived = scratch.kernel_counters + 2 * blockIdx.y;
  if (threadIdx.x == 0) {
    // The block's partials, complete after the barrier, must be visible before the ticket.
    __threadfence();
    memory.last = atomicAdd(arrived, 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!memory.last) {
    return false;
  }
  add_partials(grid.slice, memory, partials.slice, totals);
  if (threadIdx.x == 0) {
    *arrived = 0;  // ready for the next kernel of the stream
  }
  return true;
}

/// Barrier of a slice's blocks, which must all be resident.
class SliceBarrier {
 public:
  /// Reads the count early to hide the latency: it cannot change before this block arrives.
  __device__ explicit SliceBarrier(const ReductionScratch& scratch)
      : arrived_(scratch.kernel_counters + 2 * blockIdx.y) {
    if (threadIdx.x == 0) {
      round_ = *rounds();
    }
  }
  __device__ void wait() const {
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      if (atomicAdd(arrived_, 1u) == gridDim.x - 1) {
        *arrived_ = 0;
        __threadfence();
        *rounds() = round_ + 1;
      } else {
        while (*rounds() == round_) {
        }
        __threadfence();
      }
    }
    __syncthreads();
  }

 private:
  __device__ volatile unsigned* rounds() const { return arrived_ + 1; }

  unsigned* arrived_;
  unsigned round_ = 0;
};

/// As grid_sums, but every block of the slice gets the totals.
template <int kSums>
__device__ void grid_sums_everywhere(const float (&sums)[kSums][8], const BatchNormGrid& grid,
                                     const ReductionScratch& scratch, const SliceBarrier& barrier,
                                     double (&totals)[kSums]) {
  __shared__ ReductionMemory<kSums> memory;
  const SlicePartials<kSums> partials(grid, scratch);
  write_partials(sums, grid.slice, memory, partials.block);
  barrier.wait();
  add_partials(grid.slice, memory, partials.slice, totals);
}

/// Same, for a slice whose blocks form a cluster. The sums stay in shared memory, so no block may
/// exit before leave_cluster.
template <int kSums>
__device__ void cluster_sums(const float (&sums)[kSums][8], const BatchNormGrid& grid,
                             double (&totals)[kSums]) {
#if __CUDA_ARCH__ >= 900
  __shared__ ReductionMemory<kSums> memory;
  __shared__ float block[ReductionMemory<kSums>::kColumns];
  const int width = 8 * grid.slice, columns = kSums * width;
  const int place = static_cast<int>(threadIdx.x);
  const float mine = block_sum(sums, grid.slice, memory);
  if (place < columns) {
    block[place] = mine;
  }
  auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  if (place < columns) {
    double total = 0;
    const unsigned blocks = gridDim.x;
#pragma unroll 8
    for (unsigned rank = 0; rank < blocks; ++rank) {
      total += *cluster.map_shared_rank(block + place, rank);
    }
    memory.totals[place] = total;
  }
  cluster.barrier_arrive();
  __syncthreads();
  if (place < width) {
    for (int k = 0; k < kSums; ++k) {
      totals[k] = memory.totals[k * width + place];
    }
  }
#endif
}

__device__ inline void leave_cluster() {
#if __CUDA_ARCH__ >= 900
  cooperative_groups::this_cluster().barrier_wait();
#endif
}

}  // namespace ddp::ops::detail
