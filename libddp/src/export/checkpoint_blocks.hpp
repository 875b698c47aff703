// SPDX-License-Identifier: Apache-2.0
// Activation checkpointing of modules that a user names.
#pragma once

#include <string>
#include <vector>

#include "export/graph.hpp"

namespace ddp::detail {

/// Encloses the calls of each module whose path matches a pattern of the shell in a
/// tag_activation_checkpoint, whose graph the backward runs again. A module inside of one that
/// matches belongs to that. Returns how many ranges of nodes match each pattern; adjacent calls of
/// one module are one range.
std::vector<int> checkpoint_blocks(ExportedProgram& program,
                                   const std::vector<std::string>& patterns);

}  // namespace ddp::detail
