// SPDX-License-Identifier: Apache-2.0
// GELU of a product and its bias, forward and backward in one pass each.
#pragma once

#include <cstdint>

#include "ops/kernel_types.hpp"

namespace ddp::ops::detail {

/// Matrices [rows, columns] of bf16 or fp16, contiguous and 16-byte aligned; columns a multiple
/// of 8.
struct GeluRows {
  int64_t rows, columns;
  Element element;
  Element bias;  ///< float32 or `element`
  bool is_tanh;  ///< the approximation by tanh
};

/// out = gelu(x + bias); bias [columns] or nullptr.
cudaError_t launch_gelu(const GeluRows& shape, const void* x, const void* bias, void* out,
                        cudaStream_t stream);

/// grad_x = grad gelu'(x + bias), and its column sums.
///
///   parts  float32 [num_column_parts(rows, columns), columns] for the sums of rows, or nullptr
cudaError_t launch_gelu_backward(const GeluRows& shape, const void* grad, const void* x,
                                 const void* bias, void* grad_x, float* parts, cudaStream_t stream);

}  // namespace ddp::ops::detail
