// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <vector>

#include "export/fusion/fusion_graph.hpp"

namespace ddp::detail {

/// Goes from a value towards the graph's inputs, over nodes that have one reader.
class Walk {
 public:
  Walk(const FusionGraph& graph, const Argument* value) : graph_(graph), value_(value) {}

  /// Steps over a call of this overload to its input `self`. Returns nullptr for another node, and
  /// from then on.
  const Node* over(std::string_view overload) {
    const auto* node = over_optional(overload);
    value_ = node ? value_ : nullptr;
    return node;
  }
  /// The same, but stays where it is if there is no such call.
  const Node* over_optional(std::string_view overload) {
    const auto i = graph_.private_call(value_, overload);
    if (!i) {
      return nullptr;
    }
    nodes_.push_back(*i);
    value_ = graph_.at(*i).input("self");
    return &graph_.at(*i);
  }

  const Argument* value() const { return value_; }                  ///< nullptr after a failure
  const std::vector<std::size_t>& nodes() const { return nodes_; }  ///< the last one first

 private:
  const FusionGraph& graph_;
  const Argument* value_;
  std::vector<std::size_t> nodes_;
};

}  // namespace ddp::detail
