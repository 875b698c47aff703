// SPDX-License-Identifier: Apache-2.0
#include "export/fusion/all_true.hpp"

#include <algorithm>
#include <array>
#include <string_view>

#include "export/fusion/pattern_arguments.hpp"

namespace ddp::detail {
namespace {

constexpr std::array<std::string_view, 8> kViews = {
    "expand.default",  "unsqueeze.default", "slice.Tensor",    "view.default",
    "reshape.default", "alias.default",     "permute.default", "contiguous.default"};

bool is_view(const Node& node) {
  return std::any_of(kViews.begin(), kViews.end(),
                     [&](std::string_view view) { return is_call_of(node, view); });
}

// The node behind views that makes these elements, if nothing writes them later.
const Node* origin(const FusionGraph& graph, const Argument* value) {
  for (auto i = graph.source(value); i; i = graph.source(value)) {
    if (graph.is_written_later(value->name()->name)) {
      return nullptr;
    }
    const auto& node = graph.at(*i);
    if (!is_view(node)) {
      return &node;
    }
    value = node.input("self");
  }
  return nullptr;
}

// A sum with it does not overflow.
bool is_small(const Argument* number) {
  const double value = number_of(number, -1);
  return value >= 0 && value < 1e6;
}

// An arange from 0, plus numbers.
bool is_non_negative(const FusionGraph& graph, const Argument* value) {
  const auto* node = origin(graph, value);
  while (node != nullptr && is_call_of(*node, "add.Tensor") && is_small(node->input("other")) &&
         number_of(node->input("alpha"), 1) == 1) {
    node = origin(graph, node->input("self"));
  }
  const auto* dtype = node ? node->input("dtype") : nullptr;
  const bool is_int64 = is_none(dtype) || (dtype->dtype() && *dtype->dtype() == at::kLong);
  return node != nullptr && is_call_of(*node, "arange.default") && is_int64;
}

}  // namespace

bool is_all_true(const FusionGraph& graph, const Argument* value) {
  const auto* node = origin(graph, value);
  return node != nullptr && is_call_of(*node, "ge.Scalar") &&
         number_of(node->input("other"), 1) <= 0 && is_non_negative(graph, node->input("self"));
}

}  // namespace ddp::detail
