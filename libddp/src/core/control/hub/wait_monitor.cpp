// SPDX-License-Identifier: Apache-2.0
#include "core/control/hub/wait_monitor.hpp"

#include <algorithm>
#include <utility>

#include "core/control/failure/failure_cause.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

constexpr std::size_t kMaxNamed = 4;

}  // namespace

WaitMonitor::WaitMonitor(const PeerTable& peers, std::chrono::milliseconds report_after)
    : peers_(peers), report_after_(report_after), waits_(static_cast<std::size_t>(peers.size())) {}

void WaitMonitor::set_position(int rank, RankPosition position, SteadyTime now) {
  auto& wait = at(rank);
  if (!position.waits()) {
    wait.position.reset();
    return;
  }
  if (wait.position != position) {
    wait.since = now;
    wait.is_reported = false;
    positions_are_new_ = true;
  }
  wait.position = std::move(position);
}

std::string WaitMonitor::find_new_deadlock(const CollectiveRounds& rounds) {
  if (!std::exchange(positions_are_new_, false)) {
    return {};
  }
  std::vector<RankSnapshot> views;
  for (int rank = 0; rank < peers_.size(); ++rank) {
    views.push_back(
        {peers_.host(rank), rounds.pending_call(rank), rounds.num_calls(rank), at(rank).position});
  }
  return find_deadlock(views);
}

std::string WaitMonitor::report_long_waits(SteadyTime now) {
  std::vector<int> waiting;
  bool report = false;
  for (int rank = 0; rank < peers_.size(); ++rank) {
    auto& wait = at(rank);
    if (wait.position && now - wait.since >= report_after_) {
      waiting.push_back(rank);
      const bool is_new = !std::exchange(wait.is_reported, true);
      report = report || is_new;
    }
  }
  if (!report) {
    return {};
  }
  const auto busy = describe_busy(waiting);
  const auto verb =
      waiting.size() == 1 ? " waits" : concat(" and ", waiting.size() - 1, " more wait");
  return concat(peers_.name(waiting.front()), verb, " for ", report_after_.count(), " ms or longer",
                busy.empty() ? "" : "; meanwhile " + busy);
}

std::string WaitMonitor::describe_busy(const std::vector<int>& except) const {
  std::string text;
  std::size_t num_busy = 0;
  for (int rank = 0; rank < peers_.size(); ++rank) {
    if (std::find(except.begin(), except.end(), rank) != except.end() || waits(rank)) {
      continue;
    }
    if (++num_busy <= kMaxNamed) {
      const auto [step, where] = peers_.progress(rank);
      text += concat(num_busy == 1 ? "" : ", ", peers_.name(rank), " is", place_words(step, where));
    }
  }
  return num_busy > kMaxNamed ? concat(text, ", … (", num_busy, " ranks in all)") : text;
}

}  // namespace ddp::detail
