// SPDX-License-Identifier: Apache-2.0
// The peak of GPUs in dense matrix products, from NVIDIA's data sheets. Torch-free.
#pragma once

#include <optional>
#include <string>

namespace ddp::detail {

enum class FactorType { Half, BFloat16, Fp8, Tf32, Float32 };
const char* to_string(FactorType type);  ///< for messages: "float16", "bfloat16", "FP8", …

/// TFLOP/s without sparsity of a GPU by its name as NVML gives it ("NVIDIA H200"). Nothing for a
/// name or type that the table does not have, a virtual GPU or a part of one (MIG).
std::optional<double> peak_tflops(const std::string& gpu_name, FactorType type);

}  // namespace ddp::detail
