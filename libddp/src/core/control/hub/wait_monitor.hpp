// SPDX-License-Identifier: Apache-2.0
// Waits of ranks in collectives, on rank 0: it reports long waits and detects deadlocks.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/control/hub/collective_rounds.hpp"
#include "core/control/hub/deadlock.hpp"
#include "core/control/hub/peer_table.hpp"
#include "core/control/rank_position.hpp"

namespace ddp::detail {

/// The owner's mutex guards it.
class WaitMonitor {
 public:
  /// `peers` names ranks and their progress in messages. A wait is reported after `report_after`.
  WaitMonitor(const PeerTable& peers, std::chrono::milliseconds report_after);

  /// An empty position ends the rank's wait.
  void set_position(int rank, RankPosition position, SteadyTime now);
  bool waits(int rank) const { return at(rank).position.has_value(); }
  /// How long the rank waits as last reported; 0 if it does not.
  std::chrono::milliseconds waited(int rank, SteadyTime now) const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(
        waits(rank) ? now - at(rank).since : SteadyTime::duration(0));
  }
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
