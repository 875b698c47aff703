// SPDX-License-Identifier: Apache-2.0
// Notices that this rank waits in a collective, and decides when to send its position.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/progress_tracker.hpp"
#include "core/rank_position.hpp"

namespace ddp::detail {

/// The owner's mutex guards it. That mutex also keeps the control-plane call unchanged while the
/// communicators are asked, so all answers belong to this call.
class PositionWatch {
 public:
  PositionWatch(const ProgressTracker& progress, std::chrono::milliseconds heartbeat_interval);

  void add_probe(PositionBoard::Probe probe);
  void remove_probes() { probes_.clear(); }

  /// This thread calls a control-plane collective.
  void add_plane_caller() { add_caller(caller_); }
  /// This rank waits in the collective of this sequence number.
  void begin_plane_call(uint64_t sequence) { plane_call_ = sequence + 1; }
  void end_plane_call() { plane_call_ = 0; }

  /// Looks at the position every tenth of a heartbeat interval. Returns the position to send:
  /// when the rank waits, about once per heartbeat during the wait, and an empty one when it ends.
  std::optional<RankPosition> look(SteadyTime steady);

 private:
  RankPosition read_position();

  const ProgressTracker& progress_;
  const std::chrono::milliseconds interval_;
  std::vector<PositionBoard::Probe> probes_;
  uint64_t plane_call_ = 0;                  // as in RankPosition
  CallerThread caller_ = std::thread::id();  // caller of the control plane's collectives
  std::optional<RankPosition> last_position_;
  int num_looks_stood_ = 0;  // number of looks at an unchanged position
  SteadyTime next_look_{};
};

}  // namespace ddp::detail
