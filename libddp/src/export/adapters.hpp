// SPDX-License-Identifier: Apache-2.0
// The linear layers of a program, and low-rank adapters on them as nodes of its graphs.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "ddp/core/safetensors.hpp"
#include "ddp/ops/linear_owner.hpp"
#include "export/graph.hpp"

namespace ddp::detail {

/// A module of Python whose parameter `weight` is the weight of aten.linear.
struct ProgramLinear {
  std::string layer;              ///< "model.layers.0.self_attn.q_proj"
  std::set<std::string> weights;  ///< Python's names of the weight: several if it is tied
  /// The modules whose calls are the layer's, where several modules call one weight. Empty: all.
  std::set<std::string> callers = {};
  bool has_other_uses = false;  ///< another operator or layer reads the weight too

  bool is_called_by(const std::string& module) const {
    return callers.empty() || callers.count(module) != 0;
  }
};

/// In the order of the program's inputs, also from graphs in the graph. `tensors` says which names
/// are tied. Modules that share a weight and have their own bias, or none, are a layer each if both
/// call it. Else a layer of several names has that of the module that made the call, or the first.
std::vector<ProgramLinear> find_linears(const ExportedProgram& program, const TensorMap& tensors);

struct ProgramAdapter {
  ProgramLinear linear;
  double scale;
  double dropout;
};

/// Names of the adapter's parameters. Python's FX has no values with a dot in their name, so these
/// are also the names of the parameters' values.
std::string lora_a_name(const std::string& layer);
std::string lora_b_name(const std::string& layer);

/// Throws SettingsError unless `adapted` is one of `linears`, without an adapter among `tensors`,
/// and its lora_a and lora_b fit the weight.
void check_adapter(const ops::LinearLayer& adapted, const std::vector<ops::LinearLayer>& linears,
                   const TensorMap& tensors);

/// Adds the adapters' parameters to the program's inputs, and the adapters' branches behind all
/// calls of the layers. `training` is the mode of the program.
void add_adapters(ExportedProgram& program, const std::vector<ProgramAdapter>& adapters,
                  bool training);

}  // namespace ddp::detail
