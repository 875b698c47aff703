// SPDX-License-Identifier: Apache-2.0
#include "export/recurrent_weights.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace ddp::detail {
namespace {

struct LayerKind {
  int64_t mode;       // cuDNN's number
  int64_t num_gates;  // rows of a weight / hidden size
};

std::optional<LayerKind> layer_kind(const std::string& target) {
  static const std::map<std::string, LayerKind> kKinds = {
      {"torch.ops.aten.rnn_relu.input", {0, 1}},
      {"torch.ops.aten.rnn_tanh.input", {1, 1}},
      {"torch.ops.aten.lstm.input", {2, 4}},
      {"torch.ops.aten.gru.input", {3, 3}},
  };
  const auto found = kKinds.find(target);
  return found == kKinds.end() ? std::nullopt : std::optional(found->second);
}

int64_t integer(const Node& node, const char* name) {
  const auto* input = node.input(name);
  const auto* constant = input ? input->constant() : nullptr;
  return constant == nullptr ? 0 : constant->isBool() ? constant->toBool() : constant->toInt();
}

// Empty unless all weights are parameters of their own that cuDNN takes.
std::vector<at::Tensor> weights_of(const Node& node, const TensorMap& by_value_name) {
  std::vector<at::Tensor> weights;
  std::set<const void*> seen;
  const auto* list = node.input("params") ? node.input("params")->list() : nullptr;
  for (const auto& item : list ? *list : Argument::List()) {
    const auto found = item.name() ? by_value_name.find(item.name()->name) : by_value_name.end();
    if (found == by_value_name.end() || !found->second.is_cuda() ||
        !at::cudnn_is_acceptable(found->second) ||
        found->second.dtype() != by_value_name.at(list->front().name()->name).dtype() ||
        !seen.insert(found->second.const_data_ptr()).second) {
      return {};
    }
    weights.push_back(found->second);
  }
  return weights;
}

void join(const Node& node, LayerKind kind, const std::vector<at::Tensor>& weights) {
  const auto layers = integer(node, "num_layers"), directions = integer(node, "bidirectional") + 1;
  const auto per_layer =
      static_cast<int64_t>(weights.size()) / std::max<int64_t>(1, layers * directions);
  const bool has_projection = per_layer == (integer(node, "has_biases") != 0 ? 5 : 3);
  const auto hidden = weights[0].size(0) / kind.num_gates;
  at::_cudnn_rnn_flatten_weight(weights, per_layer, weights[0].size(1), kind.mode, hidden,
                                has_projection ? weights[1].size(1) : 0, layers,
                                integer(node, "batch_first") != 0, directions == 2);
}

}  // namespace

void join_recurrent_weights(const ExportedProgram& program, const TensorMap& tensors) {
  TensorMap by_value_name;
  for (std::size_t i = 0; i < program.inputs.size(); ++i) {
    const auto* name = program.graph.inputs[i].name();
    if (program.inputs[i].kind == InputKind::Parameter && name != nullptr) {
      by_value_name.emplace(name->name, tensors.at(program.inputs[i].target));
    }
  }
  const at::NoGradGuard no_grad;
  for (const auto& node : program.graph.nodes) {
    const auto kind = layer_kind(node.target);
    const auto weights = kind ? weights_of(node, by_value_name) : std::vector<at::Tensor>();
    if (!weights.empty()) {
      join(node, *kind, weights);
    }
  }
}

}  // namespace ddp::detail
