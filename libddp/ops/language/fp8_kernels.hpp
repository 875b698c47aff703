// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ops/kernel_types.hpp"
#include "ops/language/fp8_format.hpp"

namespace ddp::ops::detail {

inline constexpr int64_t kMaxQuantizedColumns = 40960;

/// in [rows, columns] of bf16 or fp16, dense and 16-byte aligned, columns a multiple of 8
/// and at most kMaxQuantizedColumns ->
/// values e4m3 [rows, columns], scales float32 [rows]: scale = the row's largest magnitude / 448,
/// or 1 for a row that becomes zeros (kTinyFp8Row); value = element / scale, rounded.
cudaError_t launch_quantize_rows(const void* in, Element element, int64_t rows, int64_t columns,
                                 void* values, float* scales, cudaStream_t stream);

/// The gradient of SwiGLU in its own dtype and as launch_quantize_rows() converts it.
///
///   grad [rows, width], gate_up [rows, 2 width] -> grad_gate_up, values [rows, 2 width], scales
///   [rows]; width a multiple of 8 and at most kMaxGatedColumns
cudaError_t launch_swiglu_backward_fp8(const void* grad, const void* gate_up, Element element,
                                       int64_t rows, int64_t width, void* grad_gate_up,
                                       void* values, float* scales, cudaStream_t stream);
inline constexpr int64_t kMaxGatedColumns = 20480;

}  // namespace ddp::ops::detail
