// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "export/fusion/fused_functions.hpp"
#include "export/fusion/pattern_arguments.hpp"
#include "export/fusion/patterns.hpp"

namespace ddp::detail {
namespace {

bool is_permuted(const FusionGraph& graph, const Argument* value) {
  const auto source = graph.source(value);
  return source && (is_call_of(graph.at(*source), "permute.default") ||
                    is_call_of(graph.at(*source), "transpose.int"));
}

// Part of a value that holds query, key and value has its strides.
bool is_permuted_or_part(const FusionGraph& graph, const Argument* value) {
  const auto source = graph.source(value);
  return is_permuted(graph, value) || (source && is_call_of(graph.at(*source), "select.int"));
}

// The result may be a view, which a later node must not write: readers of a fused node's result do
// not expect that.
bool fuse_copy(FusionGraph& graph, std::size_t i) {
  const auto& node = graph.at(i);
  const bool is_reshape = is_call_of(node, "reshape.default");
  const bool is_copy = is_reshape || (is_call_of(node, "contiguous.default") &&
                                      node.input("memory_format") == nullptr);
  if (!is_copy || !is_permuted(graph, node.input("self")) || node.outputs.size() != 1 ||
      !is_value(&node.outputs[0]) || graph.is_written_later(node.outputs[0].name()->name)) {
    return false;
  }
  std::vector<NamedArgument> inputs = {{"self", *node.input("self")}};
  if (is_reshape) {
    inputs.push_back({"shape", *node.input("shape")});
  }
  return graph.replace({i}, {.name = is_reshape ? "reshape" : "contiguous",
                             .function = is_reshape ? fused::reshape : fused::contiguous,
                             .inputs = std::move(inputs)});
}

bool is_list_of_integers(const Argument* argument) {
  const auto* list = argument != nullptr ? argument->list() : nullptr;
  return list != nullptr && !list->empty() &&
         std::none_of(list->begin(), list->end(), [](const Argument& item) {
           return integer_of(&item, kNoInteger) == kNoInteger;
         });
}

bool fuse_roll(FusionGraph& graph, std::size_t i) {
  const auto& node = graph.at(i);
  if (!is_call_of(node, "roll.default") || !is_value(node.input("self")) ||
      !is_list_of_integers(node.input("shifts")) || !is_list_of_integers(node.input("dims"))) {
    return false;
  }
  return graph.replace({i}, {.name = "roll",
                             .function = fused::roll,
                             .inputs = {{"self", *node.input("self")},
                                        {"shifts", *node.input("shifts")},
                                        {"dims", *node.input("dims")}}});
}

// Nobody writes the value's memory behind the node that makes it, nor can a caller do that.
bool keeps_values(const FusionGraph& graph, const Argument& value) {
  const auto& name = value.name()->name;
  return !graph.is_written_later(name) && !graph.is_shared_outside(name);
}

// A pad of zeros all round is a copy. Without it the value and its copy share memory.
bool fuse_pad(FusionGraph& graph, std::size_t i) {
  const auto& node = graph.at(i);
  const auto* pads = is_call_of(node, "pad.default") ? node.input("pad") : nullptr;
  if (!is_list_of_integers(pads) || !is_value(node.input("self")) ||
      graph.private_source(&node.outputs[0]) != i || !keeps_values(graph, node.outputs[0]) ||
      !keeps_values(graph, *node.input("self"))) {
    return false;
  }
  const bool pads_nothing =
      std::all_of(pads->list()->begin(), pads->list()->end(),
                  [](const Argument& pad) { return integer_of(&pad, kNoInteger) == 0; });
  if (!pads_nothing) {
    return false;
  }
  return graph.replace({i}, {.name = "pad",
                             .function = fused::pad_nothing,
                             .inputs = {{"self", *node.input("self")}, {"pad", *pads}},
                             .changes_strides = true});
}

// Optionally with a constant factor of the first matrices.
bool fuse_matmul(FusionGraph& graph, std::size_t i) {
  const auto& node = graph.at(i);
  const auto *a = node.input("self"), *b = node.input("other");
  if (!is_call_of(node, "matmul.default") || !is_value(a) || !is_value(b)) {
    return false;
  }
  std::vector<std::size_t> nodes = {i};
  c10::IValue factor = 1;
  if (const auto mul = graph.private_call(a, "mul.Tensor")) {
    const auto* other = graph.at(*mul).input("other");
    const auto* unscaled = graph.at(*mul).input("self");
    const bool is_factor = other != nullptr && !std::isnan(number_of(other, 1));
    // The backward reads what is multiplied, now without the factor.
    if (is_factor && is_value(unscaled) && keeps_values(graph, *unscaled)) {
      factor = *other->constant();
      a = unscaled;
      nodes = {*mul, i};
    }
  }
  if (!is_permuted_or_part(graph, a) && !is_permuted_or_part(graph, b)) {
    return false;
  }
  return graph.replace(nodes, {.name = "matmul",
                               .function = fused::matmul,
                               .inputs = {{"self", *a}, {"other", *b}, {"factor", {factor}}},
                               .changes_strides = true});
}

// x[:, start::2] along one dimension, by a node whose result has one reader.
struct EverySecond {
  std::size_t node;
  Slice slice;
};
std::optional<EverySecond> every_second(const FusionGraph& graph, const Argument* value) {
  const auto node = graph.private_source(value);
  const auto slice = node ? slice_of(graph.at(*node)) : std::nullopt;
  const bool fits = slice && slice->end == Slice::kEnd && slice->step == 2 && slice->dim >= 0 &&
                    (slice->start == 0 || slice->start == 1);
  return fits ? std::optional(EverySecond{*node, *slice}) : std::nullopt;
}

// The four pixels of each block of 2 x 2 behind one another, as Swin merges patches: slices of x
// along one dimension, then along another, in the order of their starts.
bool fuse_space_to_depth(FusionGraph& graph, std::size_t i) {
  const auto& node = graph.at(i);
  const auto* parts = is_call_of(node, "cat.default") ? node.input("tensors") : nullptr;
  if (parts == nullptr || !parts->list() || parts->list()->size() != 4 ||
      integer_of(node.input("dim"), 0) != -1) {
    return false;
  }
  std::vector<Slice> first, second;
  std::vector<std::size_t> nodes;
  for (const auto& part : *parts->list()) {
    const auto outer = every_second(graph, &part);
    const auto inner = outer ? every_second(graph, &outer->slice.x) : std::nullopt;
    if (!inner || inner->slice.dim == outer->slice.dim) {
      return false;
    }
    first.push_back(inner->slice);
    second.push_back(outer->slice);
    nodes.insert(nodes.end(), {inner->node, outer->node});
  }
  nodes.push_back(i);
  const bool first_fastest = first[1].start == 1;
  for (std::size_t part = 0; part < 4; ++part) {
    const int64_t fast = part % 2, slow = part / 2;
    const auto &a = first[part], &b = second[part];
    if (!is_same_value(&a.x, &first[0].x) || a.dim != first[0].dim || b.dim != second[0].dim ||
        a.start != (first_fastest ? fast : slow) || b.start != (first_fastest ? slow : fast)) {
      return false;
    }
  }
  return graph.replace(nodes, {.name = "space_to_depth",
                               .function = fused::space_to_depth,
                               .inputs = {{"x", first[0].x},
                                          {"first", {c10::IValue(first[0].dim)}},
                                          {"second", {c10::IValue(second[0].dim)}},
                                          {"first_fastest", {c10::IValue(first_fastest)}}},
                               .changes_strides = true});
}

}  // namespace

bool fuse_layout(FusionGraph& graph, std::size_t i) {
  return fuse_copy(graph, i) || fuse_roll(graph, i) || fuse_pad(graph, i) ||
         fuse_matmul(graph, i) || fuse_space_to_depth(graph, i);
}

}  // namespace ddp::detail
