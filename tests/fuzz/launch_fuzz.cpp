// SPDX-License-Identifier: Apache-2.0
// Slurm's list of tasks per node, and a launcher's environment variables: lines
// NAME=VALUE.
#include <map>

#include "core/launch/detect_launch.hpp"
#include "core/launch/tasks_per_node.hpp"
#include "fuzz/fuzz.hpp"

namespace {

constexpr int64_t kMaxAsked = 64;

void read_tasks(std::string_view text) {
  const auto all = ddp::detail::parse_tasks_per_node(text, 0, "TASKS");
  int64_t num_tasks = 0;
  if (all.num_nodes <= kMaxAsked) {
    for (int64_t node = 0; node < all.num_nodes; ++node) {
      num_tasks += ddp::detail::parse_tasks_per_node(text, node, "TASKS").on_node;
    }
    fuzz::require(num_tasks == all.num_tasks, "the tasks of all nodes are all tasks");
  }
}

void read_environment(std::string_view text) {
  std::map<std::string, std::string> variables;
  for (const auto& line : fuzz::split(text, '\n')) {
    const auto equals = line.find('=');
    variables[line.substr(0, equals)] =
        equals == std::string::npos ? std::string() : line.substr(equals + 1);
  }
  const auto launch = ddp::detect_launch_environment(
      {}, [&](const std::string& name) -> std::optional<std::string> {
        const auto found = variables.find(name);
        return found == variables.end() ? std::nullopt : std::optional(found->second);
      });
  // PMIx alone does not tell the world size.
  fuzz::require(launch.rank >= 0 && (launch.world_size == 0 || launch.rank < launch.world_size),
                "the rank lies in the job");
  // Without a number of ranks on the node it is 1, for any local rank.
  fuzz::require(launch.local_rank >= 0 &&
                    (launch.local_world_size == 1 || launch.local_rank < launch.local_world_size),
                "the local rank lies on the node");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  const auto text = fuzz::view(data, size);
  (void)fuzz::accepts([&] { read_tasks(text); });
  (void)fuzz::accepts([&] { read_environment(text); });
  return 0;
}
