// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "export/fusion/fused_functions.hpp"
#include "export/fusion/linear_layers.hpp"
#include "export/fusion/pattern_arguments.hpp"
#include "export/fusion/patterns.hpp"
#include "export/fusion/walk.hpp"

namespace ddp::detail {
namespace {

// Weight, bias and eps of a layer norm over the last dimension.
std::optional<std::vector<NamedArgument>> layer_norm_inputs(const Node& node) {
  const auto* shape = node.input("normalized_shape");
  const double eps = number_of(node.input("eps"), 1e-5);
  if (!is_call_of(node, "layer_norm.default") || !shape || !shape->list() ||
      shape->list()->size() != 1 || !has_values(node, {"input", "weight", "bias"}) || !(eps >= 0)) {
    return std::nullopt;
  }
  return std::vector<NamedArgument>{{"weight", *node.input("weight")},
                                    {"bias", *node.input("bias")},
                                    {"eps", {c10::IValue(eps)}}};
}

bool fuse_layer_norm(FusionGraph& graph, std::size_t i) {
  const auto norm = layer_norm_inputs(graph.at(i));
  if (!norm) {
    return false;
  }
  const auto input = *graph.at(i).input("input");
  const auto sum = graph.source(&input);
  if (auto operands = sum ? sum_of_branch(graph, *sum) : std::nullopt) {
    auto& layer = operands->branch.layer;
    auto inputs = layer.arguments(operands->arguments());
    inputs.insert(inputs.end(), norm->begin(), norm->end());
    layer.nodes.insert(layer.nodes.end(), {*sum, i});
    if (graph.replace(layer.nodes, {.name = "add_layer_norm",
                                    .function = fused::add_layer_norm,
                                    .inputs = std::move(inputs),
                                    .passes_on = input.name()->name,
                                    .changes_strides = true})) {
      return true;
    }
  }
  std::vector<NamedArgument> inputs = {{"input", input}};
  inputs.insert(inputs.end(), norm->begin(), norm->end());
  return graph.replace({i}, {.name = "layer_norm",
                             .function = fused::layer_norm,
                             .inputs = std::move(inputs),
                             .passes_on = input.name()->name});
}

// Of a conversion that returns its input where that has the dtype, as the op's own does. With
// `copy` the gradients of the input would be summed in another order.
std::optional<at::ScalarType> converted_dtype(const Node& node) {
  const auto* dtype = node.input("dtype") ? node.input("dtype")->dtype() : nullptr;
  const bool may_be_input =
      truth_of(node.input("copy"), false) == false && node.input("memory_format") == nullptr;
  return is_call_of(node, "to.dtype") && dtype && may_be_input ? std::optional(*dtype)
                                                               : std::nullopt;
}

struct RmsNormNodes {
  std::vector<std::size_t> nodes;  // without the last, which multiplies by the weight
  Argument input;
  Argument wide;  // the input in float32
  double eps = 0;
  at::ScalarType dtype{};
};

// Whether these nodes are mean(x², over the last dimension, which stays).
bool is_mean_square(const Node& mean, const Node& square) {
  return truth_of(mean.input("keepdim"), false) == true &&
         integers_of(mean.input("dim"), 1, 0) == Integers{-1} && mean.input("dtype") == nullptr &&
         number_of(square.input("exponent"), 0) == 2;
}

// wide * rsqrt(mean(wide²) + eps) in another dtype
std::optional<RmsNormNodes> rms_norm_of(const FusionGraph& graph, const Argument* value) {
  Walk walk(graph, value);
  const auto* convert = walk.over("to.dtype");
  const auto* product = walk.over("mul.Tensor");
  Walk root(graph, product ? product->input("other") : nullptr);
  root.over("rsqrt.default");
  const auto* sum = root.over("add.Tensor");
  const auto* mean = root.over("mean.dim");
  const auto* square = root.over("pow.Tensor_Scalar");
  if (square == nullptr || !is_same_value(root.value(), walk.value())) {
    return std::nullopt;
  }
  const double eps = number_of(sum->input("other"), -1);
  const auto dtype = converted_dtype(*convert);
  const auto widen = graph.source(walk.value());
  if (!(eps >= 0) || number_of(sum->input("alpha"), 1) != 1 || !is_mean_square(*mean, *square) ||
      !dtype || !widen || converted_dtype(graph.at(*widen)) != at::kFloat ||
      !is_value(graph.at(*widen).input("self"))) {
    return std::nullopt;
  }
  std::vector<std::size_t> nodes = {*widen};
  for (const auto* part : {&root, &walk}) {
    nodes.insert(nodes.end(), part->nodes().rbegin(), part->nodes().rend());
  }
  return RmsNormNodes{std::move(nodes), *graph.at(*widen).input("self"), *walk.value(), eps,
                      *dtype};
}

bool fuse_rms_norm(FusionGraph& graph, std::size_t i) {
  const auto& node = graph.at(i);
  if (!is_call_of(node, "mul.Tensor") || !has_values(node, {"self", "other"})) {
    return false;
  }
  const auto *self = node.input("self"), *other = node.input("other");
  auto norm = rms_norm_of(graph, other);
  const auto weight = norm ? *self : *other;
  if (!norm) {
    norm = rms_norm_of(graph, self);
  }
  if (!norm || graph.is_number(weight)) {
    return false;
  }
  if (graph.is_written_later(norm->input.name()->name)) {
    return false;  // the program saves a copy for its backward, the op the input
  }
  norm->nodes.push_back(i);
  // A module in float32 has the same tensor under both names, and adds either to its branch.
  const bool passes_wide = !graph.is_read_only_by(&norm->wide, norm->nodes);
  const auto passed = (passes_wide ? norm->wide : norm->input).name()->name;
  return graph.replace(norm->nodes, {.name = "rms_norm",
                                     .function = fused::rms_norm,
                                     .inputs = {{"input", norm->input},
                                                {"weight", weight},
                                                {"eps", {c10::IValue(norm->eps)}},
                                                {"dtype", {norm->dtype}},
                                                {"passes_wide", {c10::IValue(passes_wide)}}},
                                     .passes_on = passed,
                                     .changes_strides = true});
}

}  // namespace

bool fuse_norm(FusionGraph& graph, std::size_t i) {
  return fuse_layer_norm(graph, i) || fuse_rms_norm(graph, i);
}

}  // namespace ddp::detail
