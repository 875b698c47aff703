// SPDX-License-Identifier: Apache-2.0
// Waits of ranks in collectives, on rank 0: it reports long waits and detects deadlocks. Deadlocks
// are detected from the positions that ranks report, never by guessing. A rank that may still
// continue by itself (it saves, loads, computes, waits for the device) is never blamed.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/control/hub/collective_rounds.hpp"
#include "core/control/hub/peer_table.hpp"
#include "core/control/rank_position.hpp"

namespace ddp::detail {

/// What rank 0 knows of a rank.
struct RankSnapshot {
  std::string host;
  std::optional<PlaneCall> call;
  uint64_t num_calls = 0;                ///< control-plane calls, including `call`
  std::optional<RankPosition> position;  ///< the last one reported; may be stale
};

/// Returns both sides of a deadlock, or an empty string if none is certain. The result also holds
/// for stale positions:
/// - A rank in a control-plane call (close() included) stays there until that call completes.
///   So the number of its collectives has not changed since its report.
/// - A collective that one rank of the group has not called cannot complete on the ranks that
///   receive from it.
/// - A rank that waits for a collective cannot call the control plane if one thread makes all
///   calls, and a rank in a control-plane call cannot call a collective. A thread that has made no
///   call yet is unknown. So the program's own barrier(), in which a thread often waits for
///   others, is no proof, nor is a communicator that the rank has not used yet.
/// - Different operations with one number are always an error.
std::string find_deadlock(const std::vector<RankSnapshot>& ranks);

/// The owner's mutex guards it.
class WaitMonitor {
 public:
  /// `peers` names ranks and their progress in messages. A wait is reported after `report_after`.
  WaitMonitor(const PeerTable& peers, std::chrono::milliseconds report_after);

  /// An empty position ends the rank's wait.
  void set_position(int rank, RankPosition position, SteadyTime now);
  bool waits(int rank) const { return at(rank).position.has_value(); }
  /// Returns the error of a deadlock; empty if none is certain. Searches only if a position changed
  /// since the last call.
  std::string find_new_deadlock(const CollectiveRounds& rounds);
  /// Returns a warning about long waits; empty if all of them were reported before. A long wait is
  /// no error: the other ranks may save, load or evaluate.
  std::string report_long_waits(SteadyTime now);
  /// Describes the ranks that do not wait, without `except`: "rank 1 is at step 3 in save".
  std::string describe_busy(const std::vector<int>& except) const;

 private:
  struct Wait {
    std::optional<RankPosition> position;  ///< set while the rank waits
    SteadyTime since{};
    bool is_reported = false;
  };

  Wait& at(int rank) { return waits_[static_cast<std::size_t>(rank)]; }
  const Wait& at(int rank) const { return waits_[static_cast<std::size_t>(rank)]; }

  const PeerTable& peers_;
  const std::chrono::milliseconds report_after_;
  std::vector<Wait> waits_;  // by rank
  bool positions_are_new_ = false;
};

}  // namespace ddp::detail
