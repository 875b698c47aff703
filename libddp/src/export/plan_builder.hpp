// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <string>
#include <unordered_map>
#include <vector>

#include "export/graph_plan.hpp"

namespace ddp::detail {

/// Fills a GraphPlan.
class PlanBuilder {
 public:
  explicit PlanBuilder(GraphPlan& plan) : plan_(plan) {}
  void build(const Graph& graph);

 private:
  using Operand = GraphPlan::Operand;
  using Step = GraphPlan::Step;

  Step step_of(const Node& node);
  void add_operator(const Node& node, const c10::OperatorHandle& handle, Step& step);
  std::vector<Operand> operator_arguments(const Node& node, const c10::FunctionSchema& schema);
  std::vector<Operand> plain_arguments(const Node& node);
  /// `type` is nullptr where no schema gives one.
  Operand operand(const Argument& argument, const c10::TypePtr& type);
  Operand list_operand(const Argument::List& list, const c10::TypePtr& type);
  std::size_t define(const std::string& name);
  std::size_t slot(const std::string& name) const;
  void add_outputs(const Node& node, Step& step);
  void find_last_uses();

  GraphPlan& plan_;
  std::unordered_map<std::string, std::size_t> slots_;
};

}  // namespace ddp::detail
