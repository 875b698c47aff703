// SPDX-License-Identifier: Apache-2.0
// The thin products of low-rank adapters whose input is dropped: each layer draws its own mask
// while it reads the input, so neither masks nor dropped inputs are stored.
#pragma once

#include <cstdint>

#include "ops/kernel_types.hpp"
#include "ops/language/dropout_draws.hpp"

namespace ddp::ops::detail {

/// `layers` layers that read the same input x [rows, in] of bf16 or fp16, each with an adapter of
/// `rank`. Layer i draws with the offset draws.offset + i * kDrawsOfThread. All matrices are dense
/// and 16-byte aligned; in is a multiple of 64, rank of 8.
struct LoraShape {
  int64_t rows, in, rank, layers;
  Element element;
};

/// t_i = dropped_i(x) a_iᵀ, side by side, in parts over `in` that launch_add_parts() adds.
///
///   a [layers * rank, in] -> parts float32 [num_product_parts(), rows, layers * rank]
cudaError_t launch_dropped_product(const LoraShape& shape, const void* x, const void* a,
                                   const DropoutDraws& draws, float* parts, cudaStream_t stream);
int num_product_parts(const LoraShape& shape);

/// The sum over layers of dropped_i(u_i a_i), the adapters' part of x's gradient.
///
///   u [rows, layers * rank], a [layers * rank, in] -> grad [rows, in]
/// Needs dropped_sum_bytes() of shared memory in a block.
cudaError_t launch_dropped_sum(const LoraShape& shape, const void* u, const void* a,
                               const DropoutDraws& draws, void* grad, cudaStream_t stream);

int64_t dropped_sum_bytes(const LoraShape& shape);

/// The gradient of a, u_iᵀ dropped_i(x), in parts over rows that launch_add_parts() adds.
///
///   u [rows, layers * rank] -> parts float32 [num_gradient_parts(), layers * rank, in]
cudaError_t launch_dropped_gradient(const LoraShape& shape, const void* u, const void* x,
                                    const DropoutDraws& draws, float* parts, cudaStream_t stream);
int num_gradient_parts(const LoraShape& shape);

}  // namespace ddp::ops::detail
