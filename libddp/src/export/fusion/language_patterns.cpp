// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "export/fusion/fused_functions.hpp"
#include "export/fusion/linear_layers.hpp"
#include "export/fusion/pattern_arguments.hpp"
#include "export/fusion/patterns.hpp"

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

// The source of the value, if it only makes it, by a call with this constant.
std::optional<std::size_t> private_with(const FusionGraph& graph, const Argument* value,
                                        std::string_view overload, const char* name,
                                        double constant) {
  const auto source = graph.private_call(value, overload);
  if (!source) {
    return std::nullopt;
  }
  const auto& node = graph.at(*source);
  const bool fits = is_value(node.input("self")) && node.input(name) != nullptr &&
                    number_of(node.input(name), 0) == constant &&
                    number_of(node.input("alpha"), 1) == 1;
  return fits ? source : std::nullopt;
}

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x³))), as transformers composes it.
bool fuse_composed_gelu(FusionGraph& graph, std::size_t i) {
  if (!is_call_of(graph.at(i), "mul.Tensor")) {
    return false;
  }
  const auto input = [&](std::size_t node, const char* name) { return graph.at(node).input(name); };
  const auto half = private_with(graph, input(i, "self"), "mul.Tensor", "other", 0.5);
  const auto plus = private_with(graph, input(i, "other"), "add.Tensor", "other", 1);
  const auto tanh =
      half && plus ? graph.private_call(input(*plus, "self"), "tanh.default") : std::nullopt;
  const auto scaled =
      tanh ? private_with(graph, input(*tanh, "self"), "mul.Tensor", "other", fused::kSqrt2OverPi)
           : std::nullopt;
  const auto sum = scaled ? graph.private_call(input(*scaled, "self"), "add.Tensor") : std::nullopt;
  const auto cubic =
      sum && is_plain_sum(graph.at(*sum))
          ? private_with(graph, input(*sum, "other"), "mul.Tensor", "other", fused::kGeluCubic)
          : std::nullopt;
  const auto cube =
      cubic ? private_with(graph, input(*cubic, "self"), "pow.Tensor_Scalar", "exponent", 3)
            : std::nullopt;
  if (!cube) {
    return false;
  }
  const auto x = *input(*half, "self");
  if (!is_same_value(&x, input(*sum, "self")) || !is_same_value(&x, input(*cube, "self"))) {
    return false;
  }
  // In another order the backward would sum the gradients of x in another order.
  const std::vector<std::size_t> nodes = {*half, *cube, *cubic, *sum, *scaled, *tanh, *plus, i};
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
