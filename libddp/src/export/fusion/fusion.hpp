// SPDX-License-Identifier: Apache-2.0
// Puts ops of ddp::ops in place of chains of LibTorch's operators.
#pragma once

#include <map>
#include <string>

#include "export/graph.hpp"

namespace ddp::detail {

/// Replaces chains of the program's graph, which GraphPlan accepts, and of the graphs in its nodes.
/// A chain stays if another node needs an inner value that the op does not return. It also stays if
/// a node between its parts conflicts with its memory. Returns the number of replacements by op.
std::map<std::string, int> fuse(ExportedProgram& program);

}  // namespace ddp::detail
