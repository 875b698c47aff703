// SPDX-License-Identifier: Apache-2.0
// Tensors of a module that share memory: under several names, or as views of each other.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>

#include "ddp/core/safetensors.hpp"
#include "export/graph.hpp"

namespace ddp::detail {

/// Makes one tensor of those that Python had under several names: parameters or buffers over the
/// same elements, of which the program uses one. (Python's tracer gives each tensor one input, but
/// lists all its names. Two inputs in use are two tensors over one memory.)
void tie_names(const ExportedProgram& program, TensorMap& tensors);

/// Replaces each tensor of `other` by that of `tensors` with the same name, if this has the same
/// elements.
void share_tensors(const TensorMap& tensors, TensorMap& other);

/// Copies by their originals, on `device` and, for floating-point and complex tensors, in `dtype`.
/// Tensors over one memory are again tensors over one memory. Throws SettingsError if these have
/// different dtypes.
std::map<const at::TensorImpl*, at::Tensor> copies_of(const TensorMap& tensors,
                                                      std::optional<at::Device> device,
                                                      std::optional<at::ScalarType> dtype);

}  // namespace ddp::detail
