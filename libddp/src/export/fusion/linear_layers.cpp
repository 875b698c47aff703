// SPDX-License-Identifier: Apache-2.0
#include "export/fusion/linear_layers.hpp"

#include <utility>

#include "export/fusion/pattern_arguments.hpp"

namespace ddp::detail {
namespace {

// The sizes of a view. nullptr for other nodes.
const Argument* viewed_sizes(const Node& node) {
  const auto* sizes = is_call_of(node, "view.default")      ? node.input("size")
                      : is_call_of(node, "reshape.default") ? node.input("shape")
                                                            : nullptr;
  return sizes && sizes->list() && !sizes->list()->empty() ? sizes : nullptr;
}

BranchNodes branch_of(const FusionGraph& graph, const Argument& value) {
  BranchNodes branch{.layer = {.input = value}};
  const auto dropout = graph.private_call(&value, "dropout.default");
  const auto p = dropout ? dropout_p_of(graph.at(*dropout)) : std::nullopt;
  if (p) {
    branch = {.layer = {.nodes = {*dropout}, .input = *graph.at(*dropout).input("input")},
              .dropout_p = *p};
  }
  const auto inner = branch.layer.input;
  auto layer = private_layer(graph, &inner);
  if (layer && !ends_multihead_attention(graph, *layer)) {
    if (p) {
      layer->nodes.push_back(*dropout);
    }
    branch.layer = std::move(*layer);
  }
  return branch;
}

}  // namespace

std::vector<NamedArgument> LayerNodes::arguments(const std::vector<NamedArgument>& more) const {
  std::vector<NamedArgument> all = {{"input", input},
                                    {"weight", weight},
                                    {"bias", bias},
                                    {"transposed", {c10::IValue(transposed)}},
                                    {"sizes", sizes}};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

std::vector<NamedArgument> SumNodes::arguments() const {
  return {{"residual", residual},
          {"dropout_p", {c10::IValue(branch.dropout_p)}},
          {"branch_first", {c10::IValue(branch_first)}}};
}

std::optional<LayerNodes> linear_layer(const FusionGraph& graph, std::size_t i) {
  const auto& node = graph.at(i);
  const auto* bias = node.input("bias");
  if (is_call_of(node, "linear.default") && has_values(node, {"input", "weight"}) &&
      (is_none(bias) || is_value(bias))) {
    return LayerNodes{.nodes = {i},
                      .input = *node.input("input"),
                      .weight = *node.input("weight"),
                      .bias = bias ? *bias : Argument{}};
  }
  if (is_call_of(node, "addmm.default") && has_values(node, {"self", "mat1", "mat2"}) &&
      number_of(node.input("beta"), 1) == 1 && number_of(node.input("alpha"), 1) == 1) {
    return LayerNodes{.nodes = {i},
                      .input = *node.input("mat1"),
                      .weight = *node.input("mat2"),
                      .bias = *node.input("self"),
                      .transposed = true};
  }
  return std::nullopt;
}

std::optional<LayerNodes> layer_that_makes(const FusionGraph& graph, const Argument* value) {
  const auto last = graph.source(value);
  const auto* sizes = last ? viewed_sizes(graph.at(*last)) : nullptr;
  if (sizes == nullptr) {
    return last ? linear_layer(graph, *last) : std::nullopt;
  }
  const auto source = graph.private_source(graph.at(*last).input("self"));
  auto layer = source ? linear_layer(graph, *source) : std::nullopt;
  if (layer) {
    layer->sizes = *sizes;
    layer->nodes.push_back(*last);
  }
  return layer;
}

std::optional<LayerNodes> private_layer(const FusionGraph& graph, const Argument* value) {
  return graph.private_source(value) ? layer_that_makes(graph, value) : std::nullopt;
}

std::optional<SumNodes> sum_of_branch(const FusionGraph& graph, std::size_t i) {
  const auto& node = graph.at(i);
  if (!is_call_of(node, "add.Tensor") || !is_plain_sum(node)) {
    return std::nullopt;
  }
  const auto &self = *node.input("self"), &other = *node.input("other");
  if (graph.is_number(self) || graph.is_number(other)) {
    return std::nullopt;
  }
  auto first = branch_of(graph, self), second = branch_of(graph, other);
  return first.layer.nodes.size() > second.layer.nodes.size()
             ? SumNodes{std::move(first), other, /*branch_first=*/true}
             : SumNodes{std::move(second), self, /*branch_first=*/false};
}

}  // namespace ddp::detail
