// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

#include "ddp/core/safetensors.hpp"
#include "export/graph.hpp"

namespace ddp::detail {

/// Why the program cannot compute in `dtype`, in words: it names a dtype, or has a constant of
/// another one. Empty if it can. A constant without dimensions does not promote other tensors.
std::string fixed_dtype(const ExportedProgram& program, const TensorMap& constants,
                        at::ScalarType dtype);

}  // namespace ddp::detail
