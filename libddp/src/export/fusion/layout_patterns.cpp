// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
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
  const bool is_pad = is_call_of(node, "pad.default") && is_list_of_integers(node.input("pad")) &&
                      is_value(node.input("self"));
  if (!is_pad || graph.private_source(&node.outputs[0]) != i ||
      !keeps_values(graph, node.outputs[0]) || !keeps_values(graph, *node.input("self"))) {
    return false;
  }
  const auto& pads = *node.input("pad")->list();
  const bool pads_nothing = std::all_of(pads.begin(), pads.end(), [](const Argument& pad) {
    return integer_of(&pad, kNoInteger) == 0;
  });
  if (!pads_nothing) {
    return false;
  }
  return graph.replace({i}, {.name = "pad",
                             .function = fused::pad_nothing,
                             .inputs = {{"self", *node.input("self")}, {"pad", *node.input("pad")}},
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
  Argument x;
  int64_t dim, start;
};
std::optional<EverySecond> every_second(const FusionGraph& graph, const Argument* value) {
  constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();
  const auto slice = graph.private_call(value, "slice.Tensor");
  if (!slice || !is_value(graph.at(*slice).input("self"))) {
    return std::nullopt;
  }
  const auto& node = graph.at(*slice);
  const EverySecond found = {*slice, *node.input("self"), integer_of(node.input("dim"), 0),
                             integer_of(node.input("start"), 0)};
  const bool fits = integer_of(node.input("end"), kEnd) == kEnd &&
                    integer_of(node.input("step"), 1) == 2 && found.dim >= 0 &&
                    (found.start == 0 || found.start == 1);
  return fits ? std::optional(found) : std::nullopt;
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
  std::vector<EverySecond> first, second;
  std::vector<std::size_t> nodes;
  for (const auto& part : *parts->list()) {
    const auto outer = every_second(graph, &part);
    const auto inner = outer ? every_second(graph, &outer->x) : std::nullopt;
    if (!inner || inner->dim == outer->dim) {
      return false;
    }
    first.push_back(*inner);
    second.push_back(*outer);
    nodes.insert(nodes.end(), {inner->node, outer->node});
  }
  nodes.push_back(i);
  const bool first_fastest = first[1].start == 1;
  for (int64_t part = 0; part < 4; ++part) {
    const auto &a = first[static_cast<std::size_t>(part)],
               &b = second[static_cast<std::size_t>(part)];
    if (!is_same_value(&a.x, &first[0].x) || a.dim != first[0].dim || b.dim != second[0].dim ||
        a.start != (first_fastest ? part % 2 : part / 2) ||
        b.start != (first_fastest ? part / 2 : part % 2)) {
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
