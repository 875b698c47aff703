// SPDX-License-Identifier: Apache-2.0
// What a rank reports about one communicator when rank 0 asks all ranks for a report: its recent
// collectives, and the CUDA graphs that replay collectives. Times are ages in milliseconds at the
// time of the report, because hosts have different clocks; kUnknownAge if not known.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace ddp::detail {

/// Limits of one report.
inline constexpr std::size_t kMaxHistoryEntries = 64;  ///< collectives of one communicator
inline constexpr std::size_t kMaxHistoryGraphs = 16;   ///< graphs of one communicator
inline constexpr std::size_t kMaxEntryBytes = 256;     ///< each text of an entry

inline constexpr int64_t kUnknownAge = -1;

/// The age of `time`; kUnknownAge of the clock's epoch.
inline int64_t age_ms(std::chrono::steady_clock::time_point time,
                      std::chrono::steady_clock::time_point now) {
  return time == std::chrono::steady_clock::time_point{}
             ? kUnknownAge
             : std::chrono::duration_cast<std::chrono::milliseconds>(now - time).count();
}

enum class CollectiveState : uint8_t {
  Called,    ///< whether it has ended is not known
  Enqueued,  ///< it has not ended; whether it has started is not known
  Started,
  Ended,
  Failed  ///< aborted, or ended with an error: the last
};
const char* to_string(CollectiveState state);

struct CollectiveEntry {
  uint64_t number = 0;         ///< as GroupPosition::pending; in a graph: from 1 in each replay
  std::string operation = {};  ///< as in GroupPosition
  std::string label = {};      ///< as in GroupPosition
  std::string dtype = {};      ///< empty: no tensor
  int64_t num_bytes = 0;
  CollectiveState state = CollectiveState::Enqueued;
  int64_t enqueued_ms = kUnknownAge, started_ms = kUnknownAge, ended_ms = kUnknownAge;

  bool has_ended() const { return state == CollectiveState::Ended; }
  bool is_pending() const { return !has_ended() && state != CollectiveState::Called; }
  bool is_valid() const {
    return operation.size() <= kMaxEntryBytes && label.size() <= kMaxEntryBytes &&
           dtype.size() <= kMaxEntryBytes && state <= CollectiveState::Failed;
  }
  bool operator==(const CollectiveEntry&) const = default;
  friend auto message_fields(CollectiveEntry& entry) {
    return std::tie(entry.number, entry.operation, entry.label, entry.dtype, entry.num_bytes,
                    entry.state, entry.enqueued_ms, entry.started_ms, entry.ended_ms);
  }
};

/// A CUDA graph with collectives of the communicator. Each rank numbers its graphs by capture, and
/// decides by itself which steps it captures.
struct GraphHistory {
  uint64_t graph = 0;
  uint64_t num_replays = 0;  ///< started on the device; counters of 32 bits wrap
  /// Ended in all replays, modulo 2^32.
  uint64_t num_ended = 0;
  int64_t waited_ms = kUnknownAge;  ///< how long a started replay makes no progress
  std::vector<CollectiveEntry> nodes = {};

  bool is_pending() const { return waited_ms != kUnknownAge; }
  bool is_valid() const { return nodes.size() <= kMaxHistoryEntries; }
  bool operator==(const GraphHistory&) const = default;
  friend auto message_fields(GraphHistory& history) {
    return std::tie(history.graph, history.num_replays, history.num_ended, history.waited_ms,
                    history.nodes);
  }
};

struct GroupHistory {
  std::vector<CollectiveEntry> collectives = {};  ///< eager, the oldest first
  std::vector<GraphHistory> graphs = {};          ///< pending ones, and the last that ran
  /// Collectives that ended in replays of all graphs, also of those that are not in `graphs`.
  uint64_t num_replayed = 0;

  bool is_valid() const {
    return collectives.size() <= kMaxHistoryEntries && graphs.size() <= kMaxHistoryGraphs;
  }
  bool operator==(const GroupHistory&) const = default;
  friend auto message_fields(GroupHistory& history) {
    return std::tie(history.collectives, history.graphs, history.num_replayed);
  }
};

}  // namespace ddp::detail
