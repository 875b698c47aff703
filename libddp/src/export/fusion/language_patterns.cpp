// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <utility>
#include <vector>

#include "export/fusion/fused_functions.hpp"
#include "export/fusion/linear_layers.hpp"
#include "export/fusion/pattern_arguments.hpp"
#include "export/fusion/patterns.hpp"
#include "export/fusion/walk.hpp"

namespace ddp::detail {
namespace {

bool fuse_linear(FusionGraph& graph, std::size_t i) {
  const auto layer = linear_layer(graph, i);
  return layer &&
         graph.replace(layer->nodes,
                       {.name = "linear", .function = fused::linear, .inputs = layer->arguments()});
}

bool replace_gelu(FusionGraph& graph, LayerNodes layer, const std::vector<std::size_t>& nodes,
                  bool tanh, bool is_composed) {
  auto inputs =
      layer.arguments({{"tanh", {c10::IValue(tanh)}}, {"is_composed", {c10::IValue(is_composed)}}});
  layer.nodes.insert(layer.nodes.end(), nodes.begin(), nodes.end());
  return graph.replace(layer.nodes, {.name = "gelu",
                                     .function = fused::gelu,
                                     .inputs = std::move(inputs),
                                     .changes_strides = true});
}

bool fuse_gelu(FusionGraph& graph, std::size_t i) {
  const auto& node = graph.at(i);
  if (!is_call_of(node, "gelu.default")) {
    return false;
  }
  const auto* approximate =
      node.input("approximate") ? node.input("approximate")->constant() : nullptr;
  const bool tanh = approximate && approximate->isString() && approximate->toStringRef() == "tanh";
  auto layer = private_layer(graph, node.input("self"));
  return layer && replace_gelu(graph, std::move(*layer), {i}, tanh, /*is_composed=*/false);
}

// Whether the node exists and its argument is this constant.
bool takes(const Node* node, const char* name, double constant) {
  return node != nullptr && node->input(name) != nullptr &&
         number_of(node->input(name), 0) == constant && number_of(node->input("alpha"), 1) == 1;
}

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x³))), as transformers composes it.
bool fuse_composed_gelu(FusionGraph& graph, std::size_t i) {
  const auto& node = graph.at(i);
  if (!is_call_of(node, "mul.Tensor")) {
    return false;
  }
  Walk half(graph, node.input("self")), tanh(graph, node.input("other"));
  const bool is_half = takes(half.over("mul.Tensor"), "other", 0.5);
  const bool has_one = takes(tanh.over("add.Tensor"), "other", 1);
  tanh.over("tanh.default");
  const bool is_scaled = takes(tanh.over("mul.Tensor"), "other", fused::kSqrt2OverPi);
  const auto* sum = tanh.over("add.Tensor");
  if (!is_half || !has_one || !is_scaled || sum == nullptr || !is_plain_sum(*sum)) {
    return false;
  }
  Walk cube(graph, sum->input("other"));
  const bool is_cubic = takes(cube.over("mul.Tensor"), "other", fused::kGeluCubic);
  if (!is_cubic || !takes(cube.over("pow.Tensor_Scalar"), "exponent", 3) ||
      !is_same_value(half.value(), tanh.value()) || !is_same_value(half.value(), cube.value())) {
    return false;
  }
  const auto x = *half.value();
  // In another order the backward would sum the gradients of x in another order.
  std::vector<std::size_t> nodes = half.nodes();
  for (const auto* part : {&cube, &tanh}) {
    nodes.insert(nodes.end(), part->nodes().rbegin(), part->nodes().rend());
  }
  nodes.push_back(i);
  auto layer = graph.is_read_only_by(&x, nodes) ? layer_that_makes(graph, &x) : std::nullopt;
  return replace_gelu(graph, layer.value_or(LayerNodes{.input = x}), nodes, /*tanh=*/true,
                      /*is_composed=*/true);
}

bool fuse_branch(FusionGraph& graph, std::size_t i) {
  auto sum = sum_of_branch(graph, i);
  if (!sum || sum->branch.layer.nodes.empty()) {
    return false;
  }
  auto& layer = sum->branch.layer;
  auto inputs = layer.arguments(sum->arguments());
  layer.nodes.push_back(i);
  return graph.replace(layer.nodes, {.name = "add_branch",
                                     .function = fused::add_branch,
                                     .inputs = std::move(inputs),
                                     .changes_strides = true});
}

bool fuse_dropout(FusionGraph& graph, std::size_t i) {
  const auto& node = graph.at(i);
  const auto p = dropout_p_of(node);
  return p && *p > 0 &&
         graph.replace({i}, {.name = "dropout",
                             .function = fused::dropout,
                             .inputs = {{"x", *node.input("input")}, {"p", {c10::IValue(*p)}}},
                             .changes_strides = true});
}

}  // namespace

bool fuse_language(FusionGraph& graph, std::size_t i) {
  return fuse_gelu(graph, i) || fuse_composed_gelu(graph, i) || fuse_branch(graph, i) ||
         fuse_dropout(graph, i) || fuse_linear(graph, i);
}

}  // namespace ddp::detail
