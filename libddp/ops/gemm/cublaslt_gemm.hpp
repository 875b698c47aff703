// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "ops/gemm/gemm.hpp"

namespace ddp::ops::detail {

/// gemm() on CUDA in bf16, fp16, float32 or FP8.
void gemm_by_cublaslt(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                      const GemmOptions& options);

/// Version of the loaded library: other versions propose other algorithms.
size_t cublaslt_version();

}  // namespace ddp::ops::detail
