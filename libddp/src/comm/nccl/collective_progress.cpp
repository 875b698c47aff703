// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/collective_progress.hpp"

#include <algorithm>
#include <string_view>
#include <utility>

namespace ddp::detail {

void EagerCollectives::begin(std::span<const CollectiveRecord> collectives, TimePoint now) {
  const std::lock_guard lock(mutex_);
  for (const auto& record : collectives) {
    const std::string_view name = record.name;
    const bool is_collective = name != "send" && name != "recv";
    entry(begun_++) = {record, now, is_collective ? ++num_collectives_ : 0,
                       /*mark_follows=*/false};
  }
}

bool EagerCollectives::end(TimePoint now) {
  const std::lock_guard lock(mutex_);
  ended_ = begun_;
  mark_is_due_ = true;
  return now - last_mark_ >= kMarkInterval;
}

void EagerCollectives::cancel() {
  const std::lock_guard lock(mutex_);
  for (; begun_ != ended_; --begun_) {
    num_collectives_ -= entry(begun_ - 1).number != 0 ? 1 : 0;
  }
}

std::optional<EagerCollectives::Mark> EagerCollectives::begin_mark(TimePoint now) {
  const std::lock_guard lock(mutex_);
  if (marked_ == ended_) {
    return std::nullopt;
  }
  const auto before = std::exchange(marked_, ended_);
  mark_is_due_ = false;
  entry(marked_ - 1).mark_follows = true;
  last_mark_ = now;
  return Mark{before, marked_};
}

void EagerCollectives::cancel_mark(const Mark& mark) {
  const std::lock_guard lock(mutex_);
  marked_ = mark.before;
  mark_is_due_ = true;
  entry(mark.value - 1).mark_follows = false;
}

// The written numbers have 32 bits and wrap. Their distance to the enqueued number does not wrap.
LaneProgress EagerCollectives::lane_locked() const {
  // A launch inside NCCL counts too, because it may wait for a peer.
  const auto enqueued = begun_ == ended_ ? marked_ : begun_;
  const auto completed = std::atomic_ref(*completed_).load(std::memory_order_acquire);
  const auto pending = static_cast<uint32_t>(enqueued) - completed;
  return {enqueued, enqueued - pending};
}

LaneProgress EagerCollectives::lane() const {
  const std::lock_guard lock(mutex_);
  return lane_locked();
}

// One mark may cover several collectives, starting at `first`. Returns the index of the last.
uint64_t EagerCollectives::last_before_mark(uint64_t first, uint64_t end) const {
  auto last = first;
  while (!entry(last).mark_follows && last + 1 < end) {
    ++last;
  }
  return last;
}

std::string EagerCollectives::describe(const LaneProgress& progress) const {
  const std::lock_guard lock(mutex_);
  const auto first = progress.completed;
  const auto last = last_before_mark(first, progress.enqueued);
  return describe_any(entry(first).record, entry(last).record);
}

GroupPosition EagerCollectives::position() const {
  const std::lock_guard lock(mutex_);
  GroupPosition position;
  position.num_called = num_collectives_;
  const auto lane = lane_locked();
  if (lane.completed != lane.enqueued) {
    const auto& last = entry(last_before_mark(lane.completed, lane.enqueued));
    position.pending = last.number;
    position.operation = last.record.operation();
    position.label = last.record.label ? *last.record.label : "";
  }
  return position;
}

std::vector<CollectiveEntry> EagerCollectives::history(TimePoint now) const {
  const std::lock_guard lock(mutex_);
  const auto lane = lane_locked();
  std::vector<CollectiveEntry> entries;
  const bool has_pending = lane.completed != lane.enqueued;
  // Enough for a report, which keeps the first pending collective, some before it, and the newest.
  const auto newest = has_pending ? lane.completed : begun_;
  const auto oldest = std::max(newest - std::min<uint64_t>(newest, kMaxHistoryEntries),
                               begun_ - std::min<uint64_t>(begun_, kRecords));
  // A mark tells nothing of the collectives before its last, nor do records that were reused.
  const auto first_pending = has_pending && lane.completed >= oldest
                                 ? last_before_mark(lane.completed, lane.enqueued)
                                 : lane.enqueued;
  for (auto index = oldest; index < begun_; ++index) {
    const auto& [record, enqueued, number, mark_follows] = entry(index);
    if (number == 0) {
      continue;
    }
    // Nothing is known of what no mark follows.
    const bool is_known = index >= first_pending && index < lane.enqueued;
    const auto state = index < lane.completed ? CollectiveState::Ended
                       : is_known             ? CollectiveState::Enqueued
                                              : CollectiveState::Called;
    entries.push_back(record.to_entry(number, state));
    entries.back().enqueued_ms = age_ms(enqueued, now);
  }
  return entries;
}

std::optional<size_t> CapturedCollectives::begin(unsigned long long id) {
  const std::lock_guard lock(mutex_);
  if (!graphs_.empty() && graphs_.back().capture_id == id) {
    return std::nullopt;
  }
  if (graphs_.size() == kMaxGraphs) {
    throw SettingsError(concat("this communicator was captured into ", kMaxGraphs,
                               " CUDA graphs, and the watchdog counts no more; fix: capture a step "
                               "once and replay it"));
  }
  graphs_.push_back({.capture_id = id, .records = {}, .counted = {}});
  return graphs_.size() - 1;
}

int64_t CapturedCollectives::end(std::span<const CollectiveRecord> collectives) {
  const std::lock_guard lock(mutex_);
  auto& records = graphs_.back().records;
  records.insert(records.end(), collectives.begin(), collectives.end());
  return ++launches_;
}

std::optional<CapturedCollectives::Count> CapturedCollectives::count(int64_t launch) {
  const std::lock_guard lock(mutex_);
  if (launch != launches_) {
    return std::nullopt;
  }
  auto& records = graphs_.back().records;
  auto& counted = graphs_.back().counted;
  const auto number = records.size() - (counted.empty() ? 0 : counted.back());
  if (number > 0) {
    counted.push_back(records.size());
  }
  return Count{graphs_.size() - 1, static_cast<uint32_t>(number)};
}

void CapturedCollectives::hold_counts() {
  const std::lock_guard lock(mutex_);
  holds_counts_ = true;
  count_is_held_ = false;
}

bool CapturedCollectives::hold_count() {
  const std::lock_guard lock(mutex_);
  count_is_held_ = count_is_held_ || holds_counts_;
  return holds_counts_;
}

bool CapturedCollectives::release_counts() {
  const std::lock_guard lock(mutex_);
  holds_counts_ = false;
  return std::exchange(count_is_held_, false);
}

bool CapturedCollectives::empty() const {
  const std::lock_guard lock(mutex_);
  return graphs_.empty();
}

uint32_t CapturedCollectives::read(size_t counter) const {
  return std::atomic_ref(counters_[counter]).load(std::memory_order_acquire);
}

std::vector<LaneProgress> CapturedCollectives::lanes() const {
  const std::lock_guard lock(mutex_);
  std::vector<LaneProgress> lanes;
  lanes.reserve(graphs_.size());
  for (size_t graph = 0; graph < graphs_.size(); ++graph) {
    lanes.push_back(lane_locked(graph));
  }
  return lanes;
}

LaneProgress CapturedCollectives::lane_locked(size_t graph) const {
  const uint32_t ended =
      read(ended_of(graph));  // read before `started`, so `ended` never exceeds it
  const uint32_t started = read(started_of(graph));
  const auto expected = static_cast<uint32_t>(started * graphs_[graph].records.size());
  return {uint64_t{ended} + (expected - ended), ended};
}

void CapturedCollectives::note_progress(TimePoint now) {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < graphs_.size(); ++i) {
    auto& graph = graphs_[i];
    const auto lane = lane_locked(i);
    if (graph.last.enqueued != lane.enqueued || graph.last.completed != lane.completed) {
      graph.last = lane;
      graph.moved = now;
    }
  }
}

uint64_t CapturedCollectives::num_ended() const {
  const std::lock_guard lock(mutex_);
  uint64_t number = 0;
  for (size_t graph = 0; graph < graphs_.size(); ++graph) {
    number += lane_locked(graph).completed;
  }
  return number;
}

std::vector<GraphHistory> CapturedCollectives::history(TimePoint now) {
  note_progress(now);
  const std::lock_guard lock(mutex_);
  const auto newest =
      std::max_element(graphs_.begin(), graphs_.end(),
                       [](const Graph& a, const Graph& b) { return a.moved < b.moved; });
  std::vector<GraphHistory> histories;
  for (auto graph = graphs_.begin(); graph != graphs_.end(); ++graph) {
    const auto& [enqueued, completed] = graph->last;
    const bool is_pending = enqueued != completed;
    if (graph->records.empty() || (!is_pending && graph != newest) ||
        histories.size() == kMaxHistoryGraphs) {
      continue;
    }
    auto& history = histories.emplace_back();
    history.graph = static_cast<uint64_t>(graph - graphs_.begin());
    history.num_replays = read(started_of(history.graph));
    history.num_ended = completed;
    history.waited_ms = is_pending ? age_ms(graph->moved, now) : kUnknownAge;
    const auto num_ended = completed % graph->records.size();
    for (size_t node = 0; node < graph->records.size(); ++node) {
      const bool has_ended = !is_pending || node < num_ended;
      history.nodes.push_back(graph->records[node].to_entry(
          node + 1, has_ended ? CollectiveState::Ended : CollectiveState::Enqueued));
    }
  }
  return histories;
}

std::string CapturedCollectives::describe(size_t graph, const LaneProgress& progress) const {
  const std::lock_guard lock(mutex_);
  const auto& records = graphs_[graph].records;
  const auto& counted = graphs_[graph].counted;
  const auto first = progress.completed % records.size();
  const auto last = *std::upper_bound(counted.begin(), counted.end(), first) - 1;
  return concat(describe_any(records[first], records[last]), ", collective ", first + 1,
                last == first ? "" : concat(" to ", last + 1), " of ", records.size(),
                " captured in a CUDA graph");
}

}  // namespace ddp::detail
