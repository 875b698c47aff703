// SPDX-License-Identifier: Apache-2.0
#include "ops/language/lora_kernels.hpp"

#include <algorithm>

#include "ops/language/lora_tiles.cuh"

namespace ddp::ops::detail {
namespace {

// ---- t = dropped(x) aᵀ

constexpr int kProductRows = kThreads / kWarp * 16;  // of a block: a warp has 16
constexpr int kProductDepth = 2 * kDepth;            // of a stage
constexpr int kStages = 3;
constexpr int kRankSteps = kRankTile / 8;
// Half a line off a whole number of lines: two neighbouring rows use different banks.
constexpr int kStagePitch = kProductDepth + 32;

/// Begins to copy the stage of `a` at `k` for the block's ranks; zeros beyond them.
template <typename T>
__device__ __forceinline__ void copy_stage(const LoraShape& shape, const RankTile& ranks,
                                           const T* a, int64_t k,
                                           T (&stage)[kRankTile][kStagePitch]) {
  constexpr int kVectors = kProductDepth / kVector;
#pragma unroll
  for (int i = 0; i < kRankTile * kVectors / kThreads; ++i) {
    const int index = i * kThreads + static_cast<int>(threadIdx.x);
    const int rank = index / kVectors, column = index % kVectors * kVector;
    copy_async(shared_address(&stage[rank][column]),
               a + (ranks.first + min(rank, ranks.count - 1)) * shape.in + k + column,
               rank < ranks.count);
  }
}

/// This thread's vectors of a stage of its two rows of x.
struct ProductRows {
  uint4 upper[2], lower[2];
};

template <typename T>
__device__ __forceinline__ void load_rows(const T* upper, const T* lower, int64_t k,
                                          ProductRows& to) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    to.upper[i] = load_vector(upper + k + i * kDepth);
    to.lower[i] = load_vector(lower + k + i * kDepth);
  }
}

/// Writes a thread's sums of the rows `row` and row + 8 into this block's part.
__device__ __forceinline__ void store_sums(const LoraShape& shape, const RankTile& ranks,
                                           const Lane& lane, int64_t row, float scale,
                                           const float (&sums)[kRankSteps][4], float* parts) {
  const int64_t width = shape.layers * shape.rank;
  float* const to = parts + (blockIdx.z * shape.rows + row) * width + ranks.first;
#pragma unroll
  for (int j = 0; j < kRankSteps; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (8 * j < ranks.count && row + 8 * half < shape.rows) {
        *reinterpret_cast<float2*>(to + 8 * half * width + 8 * j + 2 * lane.quad) = {
            sums[j][2 * half] * scale, sums[j][2 * half + 1] * scale};
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    dropped_product(LoraShape shape, const T* x, const T* a, DropoutDraws draws, float* parts) {
  __shared__ T stages[kStages][kRankTile][kStagePitch];
  const Lane lane;
  const RankTile ranks = rank_tile(shape, static_cast<int>(blockIdx.x));
  const auto dropout =
      of_layer(start_draws(draws, blockIdx.x + blockIdx.y + blockIdx.z == 0 && threadIdx.x == 0),
               ranks.layer);
  const int64_t steps = shape.in / kProductDepth;
  const int64_t first = steps * blockIdx.z / gridDim.z, end = steps * (blockIdx.z + 1) / gridDim.z;
  const int64_t row =
      int64_t{blockIdx.y} * kProductRows + static_cast<int>(threadIdx.x) / kWarp * 16 + lane.row;
  // A row beyond the end reads the last one; its sums are not stored.
  const T* const upper = x + min(row, shape.rows - 1) * shape.in + lane.quad * kVector;
  const T* const lower = x + min(row + 8, shape.rows - 1) * shape.in + lane.quad * kVector;
  const int64_t upper_vector = row * shape.in / kVector + lane.quad;
  const int64_t lower_vector = (row + 8) * shape.in / kVector + lane.quad;
  float sums[kRankSteps][4] = {};
  ProductRows current, next;
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (first + i < end) {
      copy_stage(shape, ranks, a, (first + i) * kProductDepth, stages[i]);
    }
    commit_copies();
  }
  if (first < end) {
    load_rows(upper, lower, first * kProductDepth, current);
  }
  int stage = 0;
  for (int64_t step = first; step < end; ++step) {
    wait_for_copies<kStages - 2>();
    __syncthreads();
    if (step + kStages - 1 < end) {
      copy_stage(shape, ranks, a, (step + kStages - 1) * kProductDepth,
                 stages[(stage + kStages - 1) % kStages]);
    }
    commit_copies();
    if (step + 1 < end) {
      load_rows(upper, lower, (step + 1) * kProductDepth, next);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t vector = (step * kProductDepth + i * kDepth) / kVector;
      const uint4 kept_upper = masked8(dropout, upper_vector + vector, current.upper[i]);
      const uint4 kept_lower = masked8(dropout, lower_vector + vector, current.lower[i]);
#pragma unroll
      for (int j = 0; j < kRankSteps; ++j) {
        if (8 * j < ranks.count) {
          multiply_vectors<T>(
              sums[j], kept_upper, kept_lower,
              load_vector(&stages[stage][8 * j + lane.row][i * kDepth + lane.quad * kVector]));
        }
      }
    }
    current = next;
    stage = (stage + 1) % kStages;
  }
  store_sums(shape, ranks, lane, row, dropout.scale, sums, parts);
}

// ---- grad = the sum of dropped(u a)

constexpr int kSumColumns = 128;  // of a block
constexpr int kSumChunks = kSumColumns / kDepth;
constexpr int kSumRows = kThreads / kWarp * 16;  // of a block at a time
constexpr int kSumSteps = kRankTile / kDepth;
// Of a column's ranks in shared memory. Half a line off a whole number of lines: two neighbouring
// columns use different banks.
constexpr int kTilePadding = 32;

__host__ __device__ int column_pitch(const LoraShape& shape) {
  return num_rank_tiles(shape) * kRankTile + kTilePadding;
}

/// Copies this block's columns of `a` into `columns`, ranks adjacent, with zeros outside.
template <typename T>
__device__ void load_columns(const LoraShape& shape, const T* a, int64_t first_column, T* columns) {
  const int pitch = column_pitch(shape);
  const int places = num_rank_tiles(shape) * kRankTile;
  // Neighbouring threads store neighbouring ranks: without conflicts of banks.
  for (int i = static_cast<int>(threadIdx.x); i < places * kSumColumns / kVector; i += kThreads) {
    const int place = i % places, column = i / places * kVector;
    const RankTile ranks = rank_tile(shape, place / kRankTile);
    const int rank = place % kRankTile;
    Vector8<T> vector;
    vector.bits[0] = {0, 0, 0, 0};
    if (rank < ranks.count && first_column + column < shape.in) {
      vector.bits[0] = load_vector(a + (ranks.first + rank) * shape.in + first_column + column);
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      columns[(column + j) * pitch + place] = vector.values[j];
    }
  }
}

/// total += this thread's share of dropped(u a) for its two rows in all chunks of columns, of one
/// tile of ranks. `right` is the tile in shared memory at the thread's first column and vector.
// The tensor core's column c of step j is the chunk's column 8 (c / 2) + 2 j + c % 2, so that a
// thread gets eight adjacent columns of each of its two rows.
template <typename T>
__device__ __forceinline__ void add_tile(const uint4 (&upper)[kSumSteps],
                                         const uint4 (&lower)[kSumSteps], const T* right, int pitch,
                                         const DropoutState& dropout, int64_t upper_vector,
                                         int64_t lower_vector,
                                         float (&total)[kSumChunks][2][kVector]) {
#pragma unroll
  for (int chunk = 0; chunk < kSumChunks; ++chunk) {
    float sums[4][4] = {};
#pragma unroll
    for (int step = 0; step < kSumSteps; ++step) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        multiply_vectors<T>(sums[j], upper[step], lower[step],
                            load_vector(right + (chunk * kDepth + 2 * j) * pitch + step * kDepth));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Drawn8 drawn =
          draw8(dropout, (half == 0 ? upper_vector : lower_vector) + chunk * (kDepth / kVector));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        total[chunk][half][2 * j] += drawn.keeps_first(j) ? sums[j][2 * half] : 0.0F;
        total[chunk][half][2 * j + 1] += drawn.keeps_second(j) ? sums[j][2 * half + 1] : 0.0F;
      }
    }
  }
}

/// This thread's vectors of a row of u for a tile of ranks; zeros beyond the ranks.
template <typename T>
__device__ __forceinline__ void load_ranks(const T* from, int quad, int count,
                                           uint4 (&to)[kSumSteps]) {
#pragma unroll
  for (int step = 0; step < kSumSteps; ++step) {
    const int rank = step * kDepth + quad * kVector;
    to[step] = rank < count ? load_vector(from + rank) : uint4{0, 0, 0, 0};
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    dropped_sum(LoraShape shape, const T* u, const T* a, DropoutDraws draws, T* grad) {
  extern __shared__ uint4 memory[];
  T* const columns = reinterpret_cast<T*>(memory);
  const Lane lane;
  const int pitch = column_pitch(shape), tiles = num_rank_tiles(shape);
  const int64_t width = shape.layers * shape.rank;
  const int64_t first_column = int64_t{blockIdx.x} * kSumColumns;
  const auto dropout = start_draws(draws, false);
  load_columns(shape, a, first_column, columns);
  __syncthreads();
  const T* const right =
      columns + (8 * (lane.row / 2) + lane.row % 2) * pitch + lane.quad * kVector;
  const int64_t column = first_column + lane.quad * kVector;
  for (int64_t base = int64_t{blockIdx.y} * kSumRows; base < shape.rows;
       base += int64_t{gridDim.y} * kSumRows) {
    const int64_t row = base + static_cast<int>(threadIdx.x) / kWarp * 16 + lane.row;
    const T* const from_upper = u + min(row, shape.rows - 1) * width;
    const T* const from_lower = u + min(row + 8, shape.rows - 1) * width;
    float total[kSumChunks][2][kVector] = {};
    for (int tile = 0; tile < tiles; ++tile) {
      const RankTile ranks = rank_tile(shape, tile);
      uint4 upper[kSumSteps], lower[kSumSteps];
      load_ranks(from_upper + ranks.first, lane.quad, ranks.count, upper);
      load_ranks(from_lower + ranks.first, lane.quad, ranks.count, lower);
      add_tile(upper, lower, right + tile * kRankTile, pitch, of_layer(dropout, ranks.layer),
               (row * shape.in + column) / kVector, ((row + 8) * shape.in + column) / kVector,
               total);
    }
#pragma unroll
    for (int chunk = 0; chunk < kSumChunks; ++chunk) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row + 8 * half < shape.rows && column + chunk * kDepth < shape.in) {
#pragma unroll
          for (int j = 0; j < kVector; ++j) {
            total[chunk][half][j] *= dropout.scale;
          }
          store8(grad + (row + 8 * half) * shape.in + column + chunk * kDepth, 1,
                 total[chunk][half]);
        }
      }
    }
  }
}

}  // namespace

int num_product_parts(const LoraShape& shape) {
  constexpr int64_t kWantedBlocks = 264;  // two on each of 132 multiprocessors
  const int64_t blocks = int64_t{num_rank_tiles(shape)} * num_blocks(shape.rows, kProductRows);
  return static_cast<int>(
      std::clamp<int64_t>((kWantedBlocks + blocks / 2) / blocks, 1, shape.in / kProductDepth));
}

cudaError_t launch_dropped_product(const LoraShape& shape, const void* x, const void* a,
                                   const DropoutDraws& draws, float* parts, cudaStream_t stream) {
  return with_compute_type(shape.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const dim3 grid(static_cast<unsigned>(num_rank_tiles(shape)),
                    num_blocks(shape.rows, kProductRows),
                    static_cast<unsigned>(num_product_parts(shape)));
    dropped_product<<<grid, kThreads, 0, stream>>>(shape, static_cast<const T*>(x),
                                                   static_cast<const T*>(a), draws, parts);
    return cudaGetLastError();
  });
}

int64_t dropped_sum_bytes(const LoraShape& shape) {
  constexpr int64_t kElementBytes = 2;
  return int64_t{kSumColumns} * column_pitch(shape) * kElementBytes;
}

cudaError_t launch_dropped_sum(const LoraShape& shape, const void* u, const void* a,
                               const DropoutDraws& draws, void* grad, cudaStream_t stream) {
  constexpr int64_t kRowBlocks = 16;
  return with_compute_type(shape.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto bytes = static_cast<int>(dropped_sum_bytes(shape));
    const auto status =
        cudaFuncSetAttribute(dropped_sum<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status != cudaSuccess) {
      return status;
    }
    const dim3 grid(
        num_blocks(shape.in, kSumColumns),
        static_cast<unsigned>(std::min(kRowBlocks, int64_t{num_blocks(shape.rows, kSumRows)})));
    dropped_sum<<<grid, kThreads, bytes, stream>>>(
        shape, static_cast<const T*>(u), static_cast<const T*>(a), draws, static_cast<T*>(grad));
    return cudaGetLastError();
  });
}

}  // namespace ddp::ops::detail
