// SPDX-License-Identifier: Apache-2.0
// Slurm's compressed lists: hosts "rack[1-2]n[01-03,7],login" and tasks per node "4(x2),3".
// Time and memory do not grow with the numbers in the text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ddp::detail {

/// Counts the hosts in `hostlist`. Throws SettingsError naming `variable` if the list is malformed
/// (unbalanced or empty brackets, a descending range, over 64 KiB, over 2^31 hosts).
int64_t count_hosts(std::string_view hostlist, const std::string& variable);

/// The name of host `index` in list order. Throws like count_hosts, or if `index` is out of range.
std::string host_at(std::string_view hostlist, int64_t index, const std::string& variable);

struct TasksPerNode {
  int64_t num_nodes = 0;
  int64_t num_tasks = 0;
  int64_t on_node = 0;  ///< tasks on the requested node; 0 if it is not in the list
};

/// Reads "4(x2),3" and looks up node `node_rank`.
TasksPerNode parse_tasks_per_node(std::string_view text, int64_t node_rank,
                                  const std::string& variable);

}  // namespace ddp::detail
