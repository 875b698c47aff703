// SPDX-License-Identifier: Apache-2.0
#include "core/launch/tasks_per_node.hpp"

#include "core/settings/parse_number.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

constexpr std::size_t kMaxTasksBytes = 64 * 1024;
constexpr int64_t kMaxCount = int64_t{1} << 31;

[[noreturn]] void fail(const std::string& variable, std::string_view text, const std::string& why) {
  constexpr std::size_t kShown = 80;
  const std::string shown(text.substr(0, kShown));
  throw SettingsError(concat(variable, "='", shown, text.size() > kShown ? "…" : "",
                             "' cannot be read: ", why,
                             "; Slurm sets this variable, do not change it"));
}

}  // namespace

TasksPerNode parse_tasks_per_node(std::string_view text, int64_t node_rank,
                                  const std::string& variable) {
  if (text.size() > kMaxTasksBytes) {
    fail(variable, text, "it is longer than 64 KiB");
  }
  TasksPerNode result;
  std::string_view rest = text;
  for (bool more = true; more;) {
    const std::size_t comma = rest.find(',');
    more = comma != std::string_view::npos;
    std::string_view item = rest.substr(0, comma);
    rest = more ? rest.substr(comma + 1) : std::string_view();
    uint32_t repeat = 1;
    const std::size_t open = item.find("(x");
    if (open != std::string_view::npos && item.back() == ')') {
      repeat = parse_number<uint32_t>(item.substr(open + 2, item.size() - open - 3)).value_or(0);
      item = item.substr(0, open);
    }
    const auto tasks = parse_number<uint32_t>(item);
    if (!tasks || *tasks == 0 || repeat == 0) {
      fail(variable, text, "expected counts such as 4(x2),3");
    }
    if (node_rank >= result.num_nodes && node_rank < result.num_nodes + repeat) {
      result.on_node = *tasks;
    }
    result.num_nodes += repeat;
    // Checked before the addition: 2^32 * 2^32 would overflow.
    if (int64_t{repeat} > kMaxCount / *tasks || result.num_nodes > kMaxCount) {
      fail(variable, text, "it counts more than 2^31 tasks");
    }
    result.num_tasks += int64_t{repeat} * *tasks;
    if (result.num_tasks > kMaxCount) {
      fail(variable, text, "it counts more than 2^31 tasks");
    }
  }
  return result;
}

}  // namespace ddp::detail
