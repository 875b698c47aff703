// SPDX-License-Identifier: Apache-2.0
// Sums over the rows of a matrix, in blocks of 256 columns by a part of the rows.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ddp::ops::detail {

constexpr int kColumnLanes = 32;
constexpr int kColumnRows = 8;  // rows that a block handles at a time
constexpr int kColumnVector = 8;
constexpr int64_t kColumnsPerBlock = int64_t{kColumnLanes} * kColumnVector;
// About four blocks for each multiprocessor of the largest GPUs.
constexpr int64_t kColumnBlocks = 528;
constexpr int64_t kMinPartRows = 32;

inline int64_t rows_of_column_part(int64_t rows, int64_t columns) {
  const int64_t column_blocks = (columns + kColumnsPerBlock - 1) / kColumnsPerBlock;
  const int64_t parts = std::max<int64_t>(1, kColumnBlocks / column_blocks);
  return std::max(kMinPartRows, (rows + parts - 1) / parts);
}

/// The grid for blocks of dim3(kColumnLanes, kColumnRows): blockIdx.y is the part.
inline dim3 column_grid(int64_t rows, int64_t columns) {
  const int64_t part_rows = rows_of_column_part(rows, columns);
  return {static_cast<unsigned>((columns + kColumnsPerBlock - 1) / kColumnsPerBlock),
          static_cast<unsigned>(std::max<int64_t>(1, (rows + part_rows - 1) / part_rows))};
}

/// The first of the eight columns of this thread.
__device__ __forceinline__ int64_t column_of_thread() {
  return blockIdx.x * kColumnsPerBlock + threadIdx.x * kColumnVector;
}

/// Adds the sums of the block's threads and writes them to parts[blockIdx.y]. All threads call it.
__device__ __forceinline__ void write_column_part(const float (&own)[kColumnVector],
                                                  int64_t columns, float* parts) {
  __shared__ float sums[kColumnRows][kColumnLanes][kColumnVector + 1];
#pragma unroll
  for (int j = 0; j < kColumnVector; ++j) {
    sums[threadIdx.y][threadIdx.x][j] = own[j];
  }
  __syncthreads();
  // Each thread finishes one of the block's 256 columns.
  const int lane = static_cast<int>(threadIdx.y) * (kColumnLanes / kColumnRows) +
                   static_cast<int>(threadIdx.x) / kColumnVector;
  const int j = static_cast<int>(threadIdx.x) % kColumnVector;
  const int64_t finished = blockIdx.x * kColumnsPerBlock + lane * kColumnVector + j;
  if (finished < columns) {
    float sum = 0;
    for (int r = 0; r < kColumnRows; ++r) {
      sum += sums[r][lane][j];
    }
    parts[blockIdx.y * columns + finished] = sum;
  }
}

}  // namespace ddp::ops::detail
