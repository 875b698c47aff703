// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ops/language/lora_kernels.hpp"
#include "ops/language/lora_tiles.cuh"

namespace ddp::ops::detail {
namespace {

// ---- parts of uᵀ dropped(x)

constexpr int kGradientColumns = 128;  // of a block
constexpr int kGradientRows = 32;      // of a block at a time

/// The tiles of u and x that a block multiplies at a time, [rows][columns]. Rows begin in different
/// banks.
template <typename T>
struct GradientTiles {
  T u[kGradientRows][kRankTile + kVector];
  T x[kGradientRows][kGradientColumns + kVector];
};

/// A thread's vectors of both.
struct GradientVectors {
  static constexpr int kOfX = kGradientRows * kGradientColumns / kVector / kThreads;
  uint4 x[kOfX];
  uint4 u;
};
static_assert(kGradientRows * kRankTile == kVector * kThreads);

__device__ __forceinline__ int u_row() {
  return static_cast<int>(threadIdx.x) / (kRankTile / kVector);
}
__device__ __forceinline__ int u_column() {
  return static_cast<int>(threadIdx.x) % (kRankTile / kVector) * kVector;
}
__device__ __forceinline__ int x_row(int i) {
  return (i * kThreads + static_cast<int>(threadIdx.x)) / (kGradientColumns / kVector);
}
__device__ __forceinline__ int x_column() {
  return static_cast<int>(threadIdx.x) % (kGradientColumns / kVector) * kVector;
}

/// Begins to load from the tiles at `first_row`, zeros outside.
template <typename T>
__device__ __forceinline__ void load_tiles(const LoraShape& shape, const RankTile& ranks,
                                           const T* u, const T* x, int64_t first_row,
                                           GradientVectors& to) {
  to.u = {0, 0, 0, 0};
  if (first_row + u_row() < shape.rows && u_column() < ranks.count) {
    to.u = load_vector(u + (first_row + u_row()) * shape.layers * shape.rank + ranks.first +
                       u_column());
  }
  const int64_t column = int64_t{blockIdx.y} * kGradientColumns + x_column();
#pragma unroll
  for (int i = 0; i < GradientVectors::kOfX; ++i) {
    const int64_t row = first_row + x_row(i);
    to.x[i] = {0, 0, 0, 0};
    if (row < shape.rows && column < shape.in) {
      to.x[i] = load_vector(x + row * shape.in + column);
    }
  }
}

/// Stores the tiles at `first_row`, x dropped.
template <typename T>
__device__ __forceinline__ void store_tiles(const LoraShape& shape, const DropoutState& dropout,
                                            int64_t first_row, const GradientVectors& from,
                                            GradientTiles<T>& tiles) {
  const int64_t column = int64_t{blockIdx.y} * kGradientColumns + x_column();
#pragma unroll
  for (int i = 0; i < GradientVectors::kOfX; ++i) {
    const int64_t vector = ((first_row + x_row(i)) * shape.in + column) / kVector;
    *reinterpret_cast<uint4*>(&tiles.x[x_row(i)][x_column()]) = masked8(dropout, vector, from.x[i]);
  }
  *reinterpret_cast<uint4*>(&tiles.u[u_row()][u_column()]) = from.u;
}

constexpr int kGradientSteps = 8;  // of eight columns, in a warp

/// A warp's 16 ranks by 64 columns of the tiles' product.
template <typename T>
__device__ __forceinline__ void multiply_tiles(const GradientTiles<T>& tiles, int first_rank,
                                               int first_column, float (&sums)[kGradientSteps][4]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int in_matrix = lane % 8, matrix = lane / 8;
#pragma unroll
  for (int k = 0; k < kGradientRows; k += 16) {
    unsigned left[4];
    load_transposed(
        left,
        shared_address(&tiles.u[k + in_matrix + matrix / 2 * 8][first_rank + matrix % 2 * 8]));
#pragma unroll
    for (int pair = 0; pair < kGradientSteps / 2; ++pair) {
      unsigned right[4];
      load_transposed(
          right,
          shared_address(
              &tiles.x[k + in_matrix + matrix % 2 * 8][first_column + pair * 16 + matrix / 2 * 8]));
      multiply_add<T>(sums[2 * pair], left, right[0], right[1]);
      multiply_add<T>(sums[2 * pair + 1], left, right[2], right[3]);
    }
  }
}

/// Of the rows that a block of part `blockIdx.z` reads.
__host__ __device__ int64_t rows_of_part(int64_t rows, int parts) {
  const int64_t share = (rows + parts - 1) / parts;
  return (share + kGradientRows - 1) / kGradientRows * kGradientRows;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 3)
    dropped_gradient(LoraShape shape, const T* u, const T* x, DropoutDraws draws, float* parts) {
  __shared__ GradientTiles<T> tiles[2];
  const RankTile ranks = rank_tile(shape, static_cast<int>(blockIdx.x));
  const auto dropout = of_layer(start_draws(draws, false), ranks.layer);
  const int64_t share = rows_of_part(shape.rows, static_cast<int>(gridDim.z));
  const int64_t first = blockIdx.z * share, end = min(first + share, shape.rows);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warp_rank = warp / 2 * 16, warp_column = warp % 2 * 8 * kGradientSteps;
  float sums[kGradientSteps][4] = {};
  GradientVectors vectors;
  int buffer = 0;
  if (first < end) {
    load_tiles(shape, ranks, u, x, first, vectors);
  }
  for (int64_t row = first; row < end; row += kGradientRows, buffer ^= 1) {
    store_tiles(shape, dropout, row, vectors, tiles[buffer]);
    __syncthreads();
    if (row + kGradientRows < end) {
      load_tiles(shape, ranks, u, x, row + kGradientRows, vectors);
    }
    multiply_tiles(tiles[buffer], warp_rank, warp_column, sums);
  }
  const Lane lane;
#pragma unroll
  for (int j = 0; j < kGradientSteps; ++j) {
    const int64_t column =
        int64_t{blockIdx.y} * kGradientColumns + warp_column + 8 * j + 2 * lane.quad;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int rank = warp_rank + lane.row + 8 * half;
      if (rank < ranks.count && column < shape.in) {
        const int64_t row = blockIdx.z * shape.layers * shape.rank + ranks.first + rank;
        *reinterpret_cast<float2*>(parts + row * shape.in + column) = {
            sums[j][2 * half] * dropout.scale, sums[j][2 * half + 1] * dropout.scale};
      }
    }
  }
}

}  // namespace

int num_gradient_parts(const LoraShape& shape) {
  constexpr int64_t kWantedBlocks = 1188;  // three waves of three blocks on 132 multiprocessors
  const int64_t blocks = int64_t{num_rank_tiles(shape)} * num_blocks(shape.in, kGradientColumns);
  const int64_t most = (shape.rows + kGradientRows - 1) / kGradientRows;
  return static_cast<int>(
      std::clamp<int64_t>(kWantedBlocks / blocks, 1, std::max<int64_t>(1, most)));
}

cudaError_t launch_dropped_gradient(const LoraShape& shape, const void* u, const void* x,
                                    const DropoutDraws& draws, float* parts, cudaStream_t stream) {
  return with_compute_type(shape.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const dim3 grid(static_cast<unsigned>(num_rank_tiles(shape)),
                    num_blocks(shape.in, kGradientColumns),
                    static_cast<unsigned>(num_gradient_parts(shape)));
    dropped_gradient<<<grid, kThreads, 0, stream>>>(shape, static_cast<const T*>(u),
                                                    static_cast<const T*>(x), draws, parts);
    return cudaGetLastError();
  });
}

}  // namespace ddp::ops::detail
