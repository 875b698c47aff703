// SPDX-License-Identifier: Apache-2.0
#include "core/control/doctor/group_members.hpp"

#include <algorithm>
#include <limits>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

// Ranks that swapped two collectives called them shortly one after the other.
constexpr uint64_t kMaxSwapDistance = 32;

ReportedCall to_call(const CollectiveEntry& entry) {
  return {.number = entry.number,
          .operation = entry.operation,
          .label = entry.label,
          .has_ended = entry.has_ended(),
          .is_pending = entry.is_pending(),
          .first = entry.number,
          .waited_ms = std::max<int64_t>(0, entry.enqueued_ms)};
}

std::optional<ReportedCall> pending_replay(const GroupHistory& history) {
  for (const auto& graph : history.graphs) {
    const auto node = std::find_if(graph.nodes.begin(), graph.nodes.end(),
                                   [](const auto& entry) { return entry.is_pending(); });
    if (graph.is_pending() && node != graph.nodes.end()) {
      auto call = to_call(*node);
      call.waited_ms = graph.waited_ms;
      call.replay = {graph.graph, graph.num_replays};
      return call;
    }
  }
  return std::nullopt;
}

}  // namespace

std::string ReportedCall::words() const {
  const auto name = operation.substr(0, operation.find(' '));
  const auto call = with_label(concat(name, " #", number, operation.substr(name.size())), label);
  return replay ? concat(call, " of CUDA graph ", replay->first, ", replay ", replay->second)
                : call;
}

GroupMember::GroupMember(int rank_in, const GroupPosition& position, const GroupHistory& history,
                         std::chrono::milliseconds waited, std::chrono::milliseconds min_wait)
    : rank(rank_in), num_called(position.num_called), num_replayed(history.num_replayed) {
  std::optional<ReportedCall> eager;
  uint64_t first = 0;  // of the collectives before this one that may have ended or not
  for (const auto& entry : history.collectives) {
    const auto& call = calls.emplace(entry.number, to_call(entry)).first->second;
    if (call.is_pending && !eager) {
      eager = call;
      eager->first = first != 0 ? first : call.number;
    }
    first = call.has_ended ? 0 : first != 0 ? first : call.number;
  }
  for (const auto& graph : history.graphs) {
    replays[graph.graph] = {graph.num_replays, graph.num_ended};
  }
  if (!eager && position.pending != 0) {  // a compared call has no history
    eager = {.number = position.pending,
             .operation = position.operation,
             .label = position.label,
             .first = position.pending,
             .waited_ms = waited.count()};
  }
  if (num_called == std::numeric_limits<uint64_t>::max()) {
    is_counted = false;
    num_called = calls.empty() ? 0 : calls.rbegin()->first;
  }
  // An eager call may queue behind a replay.
  pending = pending_replay(history);
  if (!pending) {
    pending = std::move(eager);
  }
  if (pending && pending->waited_ms < min_wait.count()) {
    pending.reset();
  }
}

Entered GroupMember::entered(const GroupMember& waiting) const {
  const auto& call = *waiting.pending;
  const bool has_fitting = pending && pending->fits(call);
  if (!call.replay) {
    if (num_replayed == waiting.num_replayed) {
      return num_called >= call.number ? Entered::Yes : Entered::No;
    }
    return has_fitting ? Entered::Yes : Entered::Unknown;
  }
  const auto mine = replays.find(call.replay->first);
  const auto theirs = waiting.replays.find(call.replay->first);
  if (mine == replays.end() || theirs == waiting.replays.end() ||
      num_called != waiting.num_called ||
      num_replayed - mine->second.num_ended != waiting.num_replayed - theirs->second.num_ended) {
    return has_fitting ? Entered::Yes : Entered::Unknown;
  }
  return mine->second.started >= call.replay->second ? Entered::Yes : Entered::No;
}

bool GroupMember::has_ended(const GroupMember& waiting) const {
  const auto& call = *waiting.pending;
  if (waits_in(call) || entered(waiting) != Entered::Yes) {
    return false;
  }
  if (!call.replay) {
    const auto* mine = find_call(call.number);
    return mine != nullptr ? mine->has_ended : !calls.empty() && call.number < calls.begin()->first;
  }
  return !pending || (pending->replay == call.replay && pending->number > call.number);
}

bool GroupMember::may_have_passed(const GroupMember& waiting) const {
  const auto& call = *waiting.pending;
  const auto has_called = entered(waiting);
  if (has_called == Entered::No) {
    return false;
  }
  if (has_called == Entered::Yes) {
    return call.replay || pending->replay || pending->number > call.number;
  }
  const bool has_replayed = call.replay && replays.contains(call.replay->first) &&
                            replays.at(call.replay->first).started >= call.replay->second;
  return has_replayed || std::any_of(calls.begin(), calls.end(), [&](const auto& entry) {
           return entry.second.has_ended && entry.second.fits(call);
         });
}

bool GroupMember::waits_in(const ReportedCall& call) const {
  if (!pending) {
    return false;
  }
  const bool is_in_range = pending->first <= call.number && call.number <= pending->number;
  return (is_in_range && pending->replay == call.replay) || (!is_counted && pending->fits(call));
}

const ReportedCall* GroupMember::find_call(uint64_t number) const {
  const auto found = calls.find(number);
  return found == calls.end() ? nullptr : &found->second;
}

bool GroupMember::calls_elsewhere(const ReportedCall& call, uint64_t number) const {
  const auto end = calls.upper_bound(number + kMaxSwapDistance);
  return std::any_of(
      calls.upper_bound(number - std::min(number, kMaxSwapDistance)), end,
      [&](const auto& entry) { return entry.first != number && entry.second.fits(call); });
}

const GroupMember* find_earliest(const GroupMembers& members) {
  const GroupMember* earliest = nullptr;
  for (const auto& member : members) {
    if (member.pending &&
        (earliest == nullptr || member.pending->number < earliest->pending->number)) {
      earliest = &member;
    }
  }
  return earliest;
}

std::string seconds_words(int64_t milliseconds) {
  return milliseconds < 10'000 ? concat(milliseconds / 1000, ".", milliseconds / 100 % 10, " s")
                               : concat(milliseconds / 1000, " s");
}

std::string rank_words(const std::vector<int>& ranks) {
  constexpr std::size_t kMaxRanges = 16;
  std::string text;
  std::size_t num_ranges = 0;
  for (std::size_t first = 0; first < ranks.size();) {
    auto last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) {
      ++last;
    }
    if (++num_ranges > kMaxRanges) {
      text += concat(", … (", ranks.size(), " in all)");
      break;
    }
    text +=
        concat(first == 0 ? "" : ", ", ranks[first], last > first ? concat("-", ranks[last]) : "");
    first = last + 1;
  }
  return concat(ranks.size() == 1 ? "rank " : "ranks ", text);
}

}  // namespace ddp::detail
