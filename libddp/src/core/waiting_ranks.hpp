// SPDX-License-Identifier: Apache-2.0
// The ranks that wait in collectives, on rank 0: long waits are reported, deadlocks are detected.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "core/collective_rounds.hpp"
#include "core/peer_table.hpp"
#include "core/rank_position.hpp"

namespace ddp::detail {

/// The owner's mutex guards it.
class WaitingRanks {
 public:
  /// `peers` names ranks and their progress in messages. A wait is reported after `report_after`.
  WaitingRanks(const PeerTable& peers, std::chrono::milliseconds report_after);

  /// An empty position ends the rank's wait.
  void set_position(int rank, RankPosition position, SteadyTime now);
  bool waits(int rank) const { return at(rank).position.has_value(); }
  /// The error of a deadlock; empty if none is certain. Looks only at positions that changed since
  /// the last call.
  std::string find_new_deadlock(const CollectiveRounds& rounds);
  /// A warning about long waits; empty unless one of them was not reported yet. Not an error: a
  /// rank may save, load or evaluate for a long time.
  std::string report_long_waits(SteadyTime now);
  /// Positions of the ranks that do not wait, without `except`: "rank 1 is at step 3 in save".
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
