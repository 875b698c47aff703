// SPDX-License-Identifier: Apache-2.0
#include "comm/captured_collectives.hpp"

#include <algorithm>
#include <utility>

namespace ddp::detail {

std::optional<size_t> CapturedCollectives::begin(unsigned long long id) {
  const std::lock_guard lock(mutex_);
  if (!graphs_.empty() && graphs_.back().capture_id == id) {
    return std::nullopt;
  }
  if (graphs_.size() == kMaxGraphs) {
    throw SettingsError(concat("this communicator was captured into ", kMaxGraphs,
                               " CUDA graphs; more are not counted by the watchdog: capture a step "
                               "once and replay it"));
  }
  graphs_.push_back({id, {}, {}});
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
  auto& [id, records, counted] = graphs_.back();
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

std::vector<std::string> CapturedCollectives::operations(int64_t after) const {
  std::vector<std::string> operations;
  const std::lock_guard lock(mutex_);
  for (const auto& record :
       graphs_.empty() ? std::vector<CollectiveRecord>() : graphs_.back().records) {
    if (record.sequence > after) {
      operations.push_back(
          concat(record.name, " of ", record.num_elements, ' ', c10::toString(record.dtype)));
    }
  }
  return operations;
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
    const uint32_t ended =
        read(ended_of(graph));  // read before `started`, so `ended` never exceeds it
    const uint32_t started = read(started_of(graph));
    const auto expected = static_cast<uint32_t>(started * graphs_[graph].records.size());
    lanes.push_back({uint64_t{ended} + (expected - ended), ended});
  }
  return lanes;
}

std::string CapturedCollectives::describe(size_t graph, const LaneProgress& progress) const {
  const std::lock_guard lock(mutex_);
  const auto& [id, records, counted] = graphs_[graph];
  const auto first = progress.completed % records.size();
  const auto last = *std::upper_bound(counted.begin(), counted.end(), first) - 1;
  return concat(one_of(records[first], records[last]), ", collective ", first + 1,
                last == first ? "" : concat(" to ", last + 1), " of ", records.size(),
                " captured in a CUDA graph");
}

}  // namespace ddp::detail
