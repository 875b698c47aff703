// SPDX-License-Identifier: Apache-2.0
#include "comm/eager_collectives.hpp"

#include <string_view>
#include <utility>

namespace ddp::detail {

void EagerCollectives::begin(std::span<const CollectiveRecord> collectives) {
  const std::lock_guard lock(mutex_);
  for (const auto& record : collectives) {
    const std::string_view name = record.name;
    const bool of_all = name != "send" && name != "recv";
    entry(begun_++) = {record, of_all ? ++num_of_all_ : 0, /*mark_follows=*/false};
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
    num_of_all_ -= entry(begun_ - 1).number_of_all != 0 ? 1 : 0;
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

// The written numbers are 32 bits wide and wrap; their distance to the enqueued number does not.
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
  return one_of(entry(first).record, entry(last).record);
}

GroupPosition EagerCollectives::position() const {
  const std::lock_guard lock(mutex_);
  GroupPosition position;
  position.num_called = num_of_all_;
  const auto lane = lane_locked();
  if (lane.completed != lane.enqueued) {
    const auto& last = entry(last_before_mark(lane.completed, lane.enqueued));
    position.pending = last.number_of_all;
    position.operation = concat(last.record.name, " (", last.record.num_elements, ' ',
                                c10::toString(last.record.dtype), ')');
  }
  return position;
}

}  // namespace ddp::detail
