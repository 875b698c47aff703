// SPDX-License-Identifier: Apache-2.0
// Sums over the rows of a matrix, such as the gradient of a bias.
#pragma once

#include <cstdint>

#include "ops/kernel_types.hpp"

namespace ddp::ops::detail {

/// The number of parts that launch_column_sums() cuts `rows` into: the rows of its scratch memory.
int num_column_parts(int64_t rows, int64_t columns);

/// out[c] = beta out[c] + the sum of in[:, c], in float32 and in a fixed order.
///
///   in [rows, columns] contiguous, 16-byte aligned, bf16 or fp16; columns a multiple of 8
///   scratch float32 [num_column_parts(), columns]
cudaError_t launch_column_sums(const void* in, Element element, int64_t rows, int64_t columns,
                               float* scratch, const GradOut& out, cudaStream_t stream);

/// out[c] = beta out[c] + the sum of in[:, c] of float32 [parts, columns].
cudaError_t launch_add_parts(const float* in, int64_t parts, int64_t columns, const GradOut& out,
                             cudaStream_t stream);

}  // namespace ddp::ops::detail
