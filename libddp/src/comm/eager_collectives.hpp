// SPDX-License-Identifier: Apache-2.0
// The host's numbers of one communicator's eager collectives: begun, launched, marked. Free of
// CUDA. collective_counters.hpp explains the marks.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "comm/collective_record.hpp"
#include "comm/watchdog_core.hpp"
#include "core/rank_position.hpp"

namespace ddp::detail {

/// Any thread; one launch and one mark at a time.
class EagerCollectives {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  struct Mark {
    uint64_t before;  ///< the value of the mark before it
    uint64_t value;   ///< what the mark writes: the number of launched collectives
  };

  /// Marks write `completed` (modulo 2^32), which outlives this.
  explicit EagerCollectives(uint32_t* completed) : completed_(completed) {}

  /// `collectives` count as enqueued from now on.
  void begin(std::span<const CollectiveRecord> collectives);
  /// They were launched. Returns true if the last mark is old.
  bool end(TimePoint now = std::chrono::steady_clock::now());
  /// Replaces end() if the launch threw: they are not watched.
  void cancel();

  /// Whether a launch follows the newest mark. Takes no lock.
  bool mark_is_due() const { return mark_is_due_.load(std::memory_order_acquire); }
  /// The caller writes the mark. Returns nothing if no mark is due.
  std::optional<Mark> begin_mark(TimePoint now = std::chrono::steady_clock::now());
  /// Nothing will write `mark`: its collectives must not look pending for ever.
  void cancel_mark(const Mark& mark);

  LaneProgress lane() const;
  /// The collective after `progress.completed`.
  std::string describe(const LaneProgress& progress) const;
  /// Without an id.
  GroupPosition position() const;

 private:
  static constexpr size_t kRecords = 1024;
  static constexpr std::chrono::milliseconds kMarkInterval{1};

  struct Entry {
    CollectiveRecord record;
    uint64_t number_of_all = 0;  // 0: send or recv
    bool mark_follows = false;
  };
  Entry& entry(uint64_t index) { return entries_[index % kRecords]; }
  const Entry& entry(uint64_t index) const { return entries_[index % kRecords]; }
  LaneProgress lane_locked() const;
  uint64_t last_before_mark(uint64_t first, uint64_t end) const;

  uint32_t* const completed_;
  std::atomic<bool> mark_is_due_{false};  // marked_ != ended_
  mutable std::mutex mutex_;              // guards all below
  uint64_t begun_ = 0;                    // collectives
  uint64_t ended_ = 0;                    // launched; fewer than begun during an NCCL launch
  uint64_t marked_ = 0;                   // a mark follows or is being written
  uint64_t num_of_all_ = 0;               // without send and recv, which not all ranks call
  TimePoint last_mark_{};
  std::array<Entry, kRecords> entries_{};
};

}  // namespace ddp::detail
