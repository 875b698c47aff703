// SPDX-License-Identifier: Apache-2.0
// What a node can call beside LibTorch's operators.
#pragma once

#include <string>

#include "export/graph_plan.hpp"

namespace ddp::detail {

/// Python's arithmetic on sizes and other numbers ("_operator.floordiv", "torch.sym_max", …).
/// Returns an empty function for an unknown target.
StackFunction number_function(const std::string& target);
bool is_true(const c10::IValue& number);  ///< as in Python's `if`

/// A higher-order operator, which runs the graphs among the node's arguments ("cond",
/// "wrap_with_autocast", …). The other arguments come from the stack in their order. Throws
/// DataError for an operator that libddp does not know.
StackFunction higher_order_function(const Node& node);

/// A graph whose activations are not saved: the backward runs it again (ops::checkpoint()). A graph
/// that changes values from outside, other than buffers, or whose results share memory, runs as any
/// other, and this is logged. A run on copies at the first call finds that out. Throws DataError
/// unless the node has one graph.
StackFunction checkpointed_call(const Node& node);

}  // namespace ddp::detail
