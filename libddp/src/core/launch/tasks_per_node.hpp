// SPDX-License-Identifier: Apache-2.0
// Slurm's compressed list of the tasks on each node: "4(x2),3". Time and memory do not grow with
// the numbers in the text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ddp::detail {

struct TasksPerNode {
  int64_t num_nodes = 0;
  int64_t num_tasks = 0;
  int64_t on_node = 0;  ///< tasks on the requested node; 0 if it is not in the list
};

/// Reads "4(x2),3" and looks up node `node_rank`. Throws SettingsError naming `variable` if the
/// list is malformed, longer than 64 KiB, or counts more than 2^31 tasks.
TasksPerNode parse_tasks_per_node(std::string_view text, int64_t node_rank,
                                  const std::string& variable);

}  // namespace ddp::detail
