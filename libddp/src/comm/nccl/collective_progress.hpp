// SPDX-License-Identifier: Apache-2.0
// The host's side of collective_counters.hpp: which collectives of one communicator were called,
// and how many the device has ended. Free of CUDA.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/collective_label.hpp"
#include "comm/watchdog.hpp"
#include "core/control/rank_position.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

/// Describes a collective in messages. Small, because one is stored per recent collective.
struct CollectiveRecord {
  const char* name = "";
  int64_t sequence = 0;
  int64_t num_elements = -1;  ///< negative: each rank has another number
  int64_t num_bytes = 0;
  c10::ScalarType dtype = c10::kByte;
  CollectiveLabel label = {};

  std::string to_string() const {
    return with_label(num_elements < 0 ? concat(name, " #", sequence, " (uneven)")
                                       : concat(name, " #", sequence, " (", num_elements, " ",
                                                c10::toString(dtype), ", ", num_bytes, " bytes)"),
                      label ? *label : "");
  }
  /// As it is reported to rank 0. Ages are set by the caller.
  CollectiveEntry to_entry(uint64_t number, CollectiveState state) const {
    return {.number = number,
            .operation = operation(),
            .label = label ? *label : "",
            .dtype = c10::toString(dtype),
            .num_bytes = num_bytes,
            .state = state};
  }
  /// Equal on all ranks whose calls fit.
  std::string operation() const {
    return num_elements < 0 ? concat(name, " (uneven)")
                            : concat(name, " (", num_elements, ' ', c10::toString(dtype), ')');
  }
};

/// Names the collectives that one counter covers. Any of them may have failed to end.
inline std::string describe_any(const CollectiveRecord& first, const CollectiveRecord& last) {
  return first.sequence == last.sequence
             ? first.to_string()
             : concat("one of ", first.to_string(), " to ", last.to_string());
}

/// A communicator whose collectives can be captured also implements this.
class CapturableCommunicator {
 public:
  virtual ~CapturableCommunicator() = default;
  /// Whether an eager call waits for the other ranks' (check_collectives), which a replay does not
  /// make.
  virtual bool compares_calls() const = 0;
  /// Until join_counts(), waiting for a captured collective does not wait for its count.
  virtual void hold_counts() = 0;
  /// Makes the current stream wait for the held counts. Does nothing if the capture was aborted.
  virtual void join_counts() = 0;
};

/// The eager collectives: begun, launched, marked. Any thread; one launch and one mark at a time.
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
  void begin(std::span<const CollectiveRecord> collectives,
             TimePoint now = std::chrono::steady_clock::now());
  /// They were launched. Returns true if the last mark is old.
  bool end(TimePoint now = std::chrono::steady_clock::now());
  /// Replaces end() if the launch threw: they are not watched.
  void cancel();

  /// Whether a launch follows the newest mark. Takes no lock.
  bool mark_is_due() const { return mark_is_due_.load(std::memory_order_acquire); }
  /// The caller writes the mark. Returns nothing if no mark is due.
  std::optional<Mark> begin_mark(TimePoint now = std::chrono::steady_clock::now());
  /// Nothing will write `mark`, so its collectives are not pending.
  void cancel_mark(const Mark& mark);

  LaneProgress lane() const;
  /// The collective after `progress.completed`.
  std::string describe(const LaneProgress& progress) const;
  /// Without an id.
  GroupPosition position() const;
  /// The collectives without send and recv from some before the first pending one on, or the
  /// newest; the oldest first. Of one mark only the last collective can be Enqueued: of those
  /// before it nobody knows whether they have ended.
  std::vector<CollectiveEntry> history(TimePoint now = std::chrono::steady_clock::now()) const;

 private:
  static constexpr size_t kRecords = 1024;
  static constexpr std::chrono::milliseconds kMarkInterval{1};

  struct Entry {
    CollectiveRecord record;
    TimePoint enqueued{};
    uint64_t number = 0;  // 0: send or recv
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
  uint64_t num_collectives_ = 0;          // without send and recv, which not all ranks call
  TimePoint last_mark_{};
  std::array<Entry, kRecords> entries_{};
};

/// The collectives captured in CUDA graphs: records of each graph, and which of them its counters
/// cover. Any thread; one launch at a time.
class CapturedCollectives {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  static constexpr size_t kMaxGraphs = 1024;
  /// Two counters per graph: replays started, collectives ended.
  static constexpr size_t kNumCounters = 2 * kMaxGraphs;
  static size_t started_of(size_t graph) { return 2 * graph; }
  static size_t ended_of(size_t graph) { return 2 * graph + 1; }

  struct Count {
    size_t graph = 0;
    uint32_t number = 0;  ///< collectives without a count so far; may be 0
  };

  /// Replays write `counters` [kNumCounters], which outlive this.
  explicit CapturedCollectives(uint32_t* counters) : counters_(counters) {}

  /// Call before a captured launch. Returns the number of a new graph for the first launch of
  /// capture `id`. Throws SettingsError if there are too many graphs.
  std::optional<size_t> begin(unsigned long long id);
  /// Call after the launch. Returns its number.
  int64_t end(std::span<const CollectiveRecord> collectives);
  /// Numbers an eager launch; both kinds share the numbers.
  int64_t number_eager() { return ++launches_; }
  /// Returns what to count if `launch` is the newest one. Otherwise returns nothing: later
  /// collectives must be waited for too.
  std::optional<Count> count(int64_t launch);

  /// See CapturableCommunicator::hold_counts.
  void hold_counts();
  /// Whether to join the counter stream later. Its last count was just captured.
  bool hold_count();
  /// Whether to join the counter stream now. Ends hold_counts().
  bool release_counts();

  bool empty() const;
  /// One per graph.
  std::vector<LaneProgress> lanes() const;
  /// Call it a few times per second: history() tells since when a call found no progress.
  void note_progress(TimePoint now = std::chrono::steady_clock::now());
  /// Collectives that ended in all replays of all graphs. Each graph counts modulo 2^32.
  uint64_t num_ended() const;
  /// Graphs with a replay that has not ended, and the graph that made progress last.
  std::vector<GraphHistory> history(TimePoint now = std::chrono::steady_clock::now());
  /// The collective of `graph` after `progress.completed`.
  std::string describe(size_t graph, const LaneProgress& progress) const;

 private:
  struct Graph {
    unsigned long long capture_id = 0;
    std::vector<CollectiveRecord> records;
    std::vector<size_t> counted;  // number of records each count covers, ascending
    LaneProgress last = {};       // see note_progress()
    TimePoint moved = {};         // when `last` changed
  };
  LaneProgress lane_locked(size_t graph) const;
  uint32_t read(size_t counter) const;

  uint32_t* const counters_;
  std::atomic<int64_t> launches_{0};  // eager and captured
  mutable std::mutex mutex_;          // guards all below
  bool holds_counts_ = false;         // in a capture
  bool count_is_held_ = false;
  std::vector<Graph> graphs_;
};

}  // namespace ddp::detail
