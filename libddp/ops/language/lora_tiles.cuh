// SPDX-License-Identifier: Apache-2.0
// What the kernels of low-rank adapters share.
//
// All three kernels read or write the wide matrix once, in vectors of eight elements of a row, each
// of which takes one draw of the generator. A sum over k may run in any order if both factors keep
// it, so a thread's vector serves as its part of two tensor-core steps without shuffles: step s
// takes the elements 4 s … 4 s + 3 of the vectors of the four threads that share a row.
#pragma once

#include "ops/kernel_types.cuh"
#include "ops/language/dropout_draws.cuh"
#include "ops/language/lora_kernels.hpp"
#include "ops/tensor_core.cuh"

namespace ddp::ops::detail {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kVector = 8;
constexpr int kRankTile = 64;  // of a layer's rank, in one block
constexpr int kDepth = 32;     // of k: four vectors

/// This thread's place in a warp's tile of 16 x 8 sums.
struct Lane {
  int row = static_cast<int>(threadIdx.x) % kWarp / 4;   // and row + 8
  int quad = static_cast<int>(threadIdx.x) % kWarp % 4;  // of the threads with this row
};

__device__ __forceinline__ uint4 load_vector(const void* from) {
  return *static_cast<const uint4*>(from);
}

/// sums += the product over kDepth elements of two rows of the left factor and one of the right.
template <typename T>
__device__ __forceinline__ void multiply_vectors(float (&sums)[4], const uint4& upper,
                                                 const uint4& lower, const uint4& right) {
  multiply_add<T>(sums, {upper.x, lower.x, upper.y, lower.y}, right.x, right.y);
  multiply_add<T>(sums, {upper.z, lower.z, upper.w, lower.w}, right.z, right.w);
}

__device__ __forceinline__ DropoutState of_layer(DropoutState state, int layer) {
  state.counter += static_cast<uint64_t>(layer) * (kDrawsOfThread / 4);
  return state;
}

/// Up to kRankTile ranks of one layer.
struct RankTile {
  int layer, count;
  int64_t first;  // of all layers' ranks
};

__device__ __forceinline__ RankTile rank_tile(const LoraShape& shape, int index) {
  const int tiles = static_cast<int>((shape.rank + kRankTile - 1) / kRankTile);
  const int layer = index / tiles, first = index % tiles * kRankTile;
  return {.layer = layer,
          .count = min(static_cast<int>(shape.rank) - first, kRankTile),
          .first = layer * shape.rank + first};
}

/// The tiles of ranks of all layers, each filled up to kRankTile.
__host__ __device__ inline int num_rank_tiles(const LoraShape& shape) {
  return static_cast<int>(shape.layers * ((shape.rank + kRankTile - 1) / kRankTile));
}

}  // namespace ddp::ops::detail
