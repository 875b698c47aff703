// SPDX-License-Identifier: Apache-2.0
// One communicator's collectives captured in CUDA graphs: records of each graph, and which of them
// its counters cover. Free of CUDA. collective_counters.hpp explains the counters.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/collective_record.hpp"
#include "comm/watchdog_core.hpp"

namespace ddp::detail {

/// Any thread; one launch at a time.
class CapturedCollectives {
 public:
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
  /// What to count if `launch` is the newest one. Otherwise later collectives must be waited for
  /// too, and it returns nothing.
  std::optional<Count> count(int64_t launch);

  /// See OperationLog::hold_counts.
  void hold_counts();
  /// Whether to join the counter stream later. Its last count was just captured.
  bool hold_count();
  /// Whether to join the counter stream now. Ends hold_counts().
  bool release_counts();
  /// See OperationLog.
  std::vector<std::string> operations(int64_t after) const;

  bool empty() const;
  /// One per graph.
  std::vector<LaneProgress> lanes() const;
  /// The collective of `graph` after `progress.completed`.
  std::string describe(size_t graph, const LaneProgress& progress) const;

 private:
  struct Graph {
    unsigned long long capture_id = 0;
    std::vector<CollectiveRecord> records;
    std::vector<size_t> counted;  // number of records each count covers, ascending
  };
  uint32_t read(size_t counter) const;

  uint32_t* const counters_;
  std::atomic<int64_t> launches_{0};  // eager and captured
  mutable std::mutex mutex_;          // guards all below
  bool holds_counts_ = false;         // in a capture
  bool count_is_held_ = false;
  std::vector<Graph> graphs_;
};

}  // namespace ddp::detail
