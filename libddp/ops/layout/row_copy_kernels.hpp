// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ddp::ops::detail {

inline constexpr int kMaxRowDims = 6;
inline constexpr int64_t kMaxRowVectors = (int64_t{1} << 31) - (1 << 16);  ///< of one copy

/// Vectors of `vector_bytes` (4, 8 or 16), as an array of `dims` dimensions, the innermost first.
/// Strides are in vectors, and those of dimension 0 are 1.
struct RowCopy {
  int dims = 0;
  int vector_bytes = 0;
  int64_t vectors = 0;  ///< in all: at most kMaxRowVectors
  uint32_t sizes[kMaxRowDims] = {};
  int64_t to_strides[kMaxRowDims] = {};
  int64_t from_strides[kMaxRowDims] = {};
};

/// Addresses must be multiples of a vector.
cudaError_t launch_row_copy(const RowCopy& copy, void* to, const void* from, cudaStream_t stream);

}  // namespace ddp::ops::detail
