// SPDX-License-Identifier: Apache-2.0
// A module's weights as a safetensors file, under its own parameter and buffer names.
#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "ddp/core/safetensors.hpp"

namespace ddp {

/// Differences between the keys of a file and a module.
struct WeightDifferences {
  std::vector<std::string> missing;       ///< in the module, not in the file
  std::vector<std::string> unexpected;    ///< in the file, not in the module
  std::vector<std::string> wrong_shapes;  ///< "fc.weight: [10, 512] in the module, [9, 512] in …"
  /// True if every key fits.
  bool empty() const { return missing.empty() && unexpected.empty() && wrong_shapes.empty(); }
  std::string to_string() const;  ///< one line, at most ten names of each kind
};

/// Compares names and shapes only. Tensors may be on the meta device.
WeightDifferences compare_weights(const TensorMap& module, const TensorMap& file);
/// Parameters and buffers by name; they alias the module's memory.
TensorMap named_weights(const torch::nn::Module& module);
/// Writes named_weights() with save_safetensors(), which says what it throws.
void save_weights(const torch::nn::Module& module, const std::string& path);

/// Copies a file's tensors into the module, casting to its dtypes and devices.
/// - `strict` (as in PyTorch): unless every key fits, throws MismatchError with all three lists and
///   changes nothing.
/// - Not strict: copies the keys that fit, and throws for wrong shapes.
/// A checkpoint's model.safetensors fits too: it has tied weights under one of their names, and
/// also the buffers that Python's state_dict() lacks (persistent=False). Returns the differences.
WeightDifferences load_weights(torch::nn::Module& module, const std::string& path,
                               bool strict = true);
/// Uses only the keys `PREFIX.NAME` of the file, those of one among several models.
///   load_weights(*module, "…/step_0000000120/generator.safetensors", "generator");
/// Throws MismatchError with the file's prefixes if no key has this one, also if not strict.
WeightDifferences load_weights(torch::nn::Module& module, const std::string& path,
                               const std::string& prefix, bool strict = true);
WeightDifferences load_weights(torch::nn::Module& module, const std::string& path,
                               const char* prefix, bool strict = true);
/// The same from tensors in memory; messages name `source`.
WeightDifferences load_weights(torch::nn::Module& module, const TensorMap& tensors,
                               const std::string& source, bool strict = true);
/// Copies `tensors` into `weights` that belong to no torch::nn module, for example to a
/// torch::jit::Module.
WeightDifferences load_weights(const TensorMap& weights, const TensorMap& tensors,
                               const std::string& source, bool strict = true);

}  // namespace ddp
