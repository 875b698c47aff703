// SPDX-License-Identifier: Apache-2.0
// Tensors of a module that share memory: under several names, or as views of each other.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>

#include "ddp/core/safetensors.hpp"
#include "export/graph.hpp"

namespace ddp::detail {

/// Makes one tensor of those that Python had under several names: parameters or buffers over the
/// same elements, of which the program uses one. (Python's tracer gives each tensor one input, but
/// lists all its names. Two inputs in use are two tensors over one memory.) `tensors` may have
/// names that are no inputs: a strict export lists one of several.
void tie_names(const ExportedProgram& program, TensorMap& tensors);

/// The name of a tensor that uses the memory of another one, as a view of it. Empty: none does.
std::string first_view(const TensorMap& tensors);

/// Replaces each tensor of `other` by that of `tensors` with the same name, if this has the same
/// elements.
void share_tensors(const TensorMap& tensors, TensorMap& other);

/// Copies by their originals, on `device` and, for floating-point and complex tensors, in `dtype`.
/// Tensors over one memory are again tensors over one memory. Throws SettingsError if these have
/// different dtypes.
std::map<const at::TensorImpl*, at::Tensor> copies_of(const TensorMap& tensors,
                                                      std::optional<at::Device> device,
                                                      std::optional<at::ScalarType> dtype);

/// Copies of the tensors of programs, by program and name. Tensors that programs have in common,
/// and those of the program `first` over one memory, stay so.
std::map<std::string, TensorMap> copies_by_program(const std::map<std::string, TensorMap>& programs,
                                                   const std::string& first,
                                                   std::optional<at::Device> device);

}  // namespace ddp::detail
