// SPDX-License-Identifier: Apache-2.0
// The end of a residual branch: bias, dropout and addition in one pass.
#pragma once

#include <cstdint>

#include "ops/kernel_types.hpp"
#include "ops/language/dropout_draws.hpp"

namespace ddp::ops::detail {

/// Matrices [rows, columns] of bf16 or fp16, contiguous and 16-byte aligned; columns a multiple
/// of 8.
struct BranchRows {
  int64_t rows, columns;
  Element element;
  Element bias;  ///< float32 or `element`
};

/// out = dropout(branch + bias) + residual; bias and residual may be nullptr.
cudaError_t launch_add_branch(const BranchRows& shape, const void* branch, const void* bias,
                              const void* residual, const DropoutDraws& draws, void* out,
                              cudaStream_t stream);

/// The backward: out = dropout(grad), and its column sums.
///
///   parts  float32 [num_column_parts(rows, columns), columns] for the sums of rows, or nullptr
cudaError_t launch_add_branch_backward(const BranchRows& shape, const void* grad,
                                       const DropoutDraws& draws, void* out, float* parts,
                                       cudaStream_t stream);

}  // namespace ddp::ops::detail
