// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <optional>
#include <vector>

#include "export/fusion/fused_functions.hpp"
#include "export/fusion/pattern_arguments.hpp"
#include "export/fusion/patterns.hpp"

namespace ddp::detail {
namespace {

// silu(gate) * up, in either order.
bool fuse_swiglu(FusionGraph& graph, std::size_t i) {
  const auto& node = graph.at(i);
  if (!is_call_of(node, "mul.Tensor") || !has_values(node, {"self", "other"})) {
    return false;
  }
  const auto *self = node.input("self"), *other = node.input("other");
  const auto first = graph.private_call(self, "silu.default");
  const auto silu = first ? first : graph.private_call(other, "silu.default");
  const auto up = first ? *other : *self;
  if (!silu || !is_value(graph.at(*silu).input("self")) || graph.is_number(up)) {
    return false;
  }
  return graph.replace({*silu, i}, {.name = "swiglu",
                                    .function = fused::swiglu,
                                    .inputs = {{"gate", *graph.at(*silu).input("self")},
                                               {"up", up},
                                               {"gate_first", {c10::IValue(first.has_value())}}},
                                    .changes_strides = true});
}

// x[..., start : end] by constants, with one reader
struct Part {
  std::size_t node;
  Argument x;
  int64_t dim, start, end;
};
std::optional<Part> part_of(const FusionGraph& graph, const Argument* value) {
  const auto node = graph.private_source(value);
  const auto slice = node ? slice_of(graph.at(*node)) : std::nullopt;
  if (!slice || slice->step != 1) {
    return std::nullopt;
  }
  return Part{*node, slice->x, slice->dim, slice->start, slice->end};
}

// cat([-x[half:], x[:half]], -1)
struct RotatedHalf {
  std::vector<std::size_t> nodes;
  Argument x;
  int64_t dim, half;
};
std::optional<RotatedHalf> rotated_half(const FusionGraph& graph, const Argument* value) {
  const auto cat = graph.private_call(value, "cat.default");
  const auto* parts = cat ? graph.at(*cat).input("tensors") : nullptr;
  if (parts == nullptr || !parts->list() || parts->list()->size() != 2 ||
      integer_of(graph.at(*cat).input("dim"), 0) != -1) {
    return std::nullopt;
  }
  const auto neg = graph.private_call(&parts->list()->front(), "neg.default");
  const auto second = neg ? part_of(graph, graph.at(*neg).input("self")) : std::nullopt;
  const auto first = part_of(graph, &parts->list()->back());
  if (!first || !second || !is_same_value(&first->x, &second->x) || first->dim != second->dim ||
      first->start != 0 || first->end <= 0 || second->start != first->end ||
      second->end != Slice::kEnd) {
    return std::nullopt;
  }
  return RotatedHalf{{first->node, second->node, *neg, *cat}, first->x, first->dim, second->start};
}

// x * cos + rotated_half(x) * sin
bool fuse_rotary(FusionGraph& graph, std::size_t i) {
  const auto& node = graph.at(i);
  if (!is_call_of(node, "add.Tensor") || !is_plain_sum(node)) {
    return false;
  }
  const auto straight = graph.private_call(node.input("self"), "mul.Tensor");
  const auto rotated = graph.private_call(node.input("other"), "mul.Tensor");
  const auto half = rotated ? rotated_half(graph, graph.at(*rotated).input("self")) : std::nullopt;
  if (!straight || !half) {
    return false;
  }
  const auto *cos = graph.at(*straight).input("other"), *sin = graph.at(*rotated).input("other");
  if (!is_same_value(graph.at(*straight).input("self"), &half->x) || !is_value(cos) ||
      !is_value(sin) || graph.is_number(*cos) || graph.is_number(*sin)) {
    return false;
  }
  // In another order the backward would sum the gradients of x in another order.
  std::vector<std::size_t> nodes = {*straight};
  nodes.insert(nodes.end(), half->nodes.begin(), half->nodes.end());
  nodes.insert(nodes.end(), {*rotated, i});
  return graph.replace(nodes, {.name = "apply_rotary",
                               .function = fused::apply_rotary,
                               .inputs = {{"x", half->x},
                                          {"cos", *cos},
                                          {"sin", *sin},
                                          {"dim", {c10::IValue(half->dim)}},
                                          {"half", {c10::IValue(half->half)}}}});
}

}  // namespace

bool fuse_decoder(FusionGraph& graph, std::size_t i) {
  return fuse_swiglu(graph, i) || fuse_rotary(graph, i);
}

}  // namespace ddp::detail
