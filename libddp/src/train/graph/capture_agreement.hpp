// SPDX-License-Identifier: Apache-2.0
// The ranks' agreement about captures of one GraphedStep.
//
// Every rank decides alone whether a call captures, replays or runs eagerly, because a replay must
// not wait for other ranks. A capture compares all ranks' collectives by an all_gather of the
// control plane. This exchange alone is not enough: a rank that decided otherwise never joins it.
// If the step has collectives, that rank's device waits for the capturing rank, so neither rank
// would reach another collective of the control plane. Therefore a rank announces a capture before
// it waits. Other ranks check the announcements at each call and while they wait for a step's
// numbers.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "core/plane_interfaces.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// One rank's capture. Equal steps in equal order have equal numbers on all ranks.
struct CaptureReport {
  int64_t step_id = 0;                       ///< which of the program's GraphedSteps
  int64_t call = 0;                          ///< index of this call of the step
  int64_t variant = 0;                       ///< StepNumbers::variant
  std::string shapes = {};                   ///< of the batch, for messages
  std::string reason = {};                   ///< why it failed; empty: success
  std::vector<std::string> operations = {};  ///< its collectives, in order

  friend auto message_fields(CaptureReport& report) {
    return std::tie(report.step_id, report.call, report.variant, report.shapes, report.reason,
                    report.operations);
  }
};

std::string encode(const CaptureReport& report);
/// False if `text` is no report: the rank was in another collective of the control plane.
bool decode(const std::string& text, CaptureReport& report);

/// Compares the `texts` of all ranks at rank `own`'s capture of the step called `name`. Returns the
/// first rank's reason why no rank replays; empty: all captured the same collectives. Throws
/// SettingsError on every rank if the ranks were not in the same call.
std::string compare_captures(const std::vector<std::string>& texts, size_t own,
                             const std::string& name);

/// `announcements` are the reports of the ranks' last captures, made before waiting for the others.
/// On this rank `calls_done` calls of step `step_id` are done, and `last_captured` was the last
/// captured one. Throws SettingsError if a rank captures a call that this rank ran without a
/// capture: that rank would wait forever. `shapes` are those of the last batch here. Returns true
/// if a rank captures a later call of this rank, so the same announcements must be checked again.
bool require_no_missed_capture(const std::vector<std::string>& announcements, size_t own,
                               int64_t step_id, int64_t calls_done, int64_t last_captured,
                               const std::string& name, const std::string& shapes);

/// One per GraphedStep. Use from one thread.
class CaptureAgreement {
 public:
  /// All ranks count their steps in the same way, so `step_id` is the same on all ranks. 0: the
  /// step calls no collective, ranks may run it differently, and nothing is exchanged.
  CaptureAgreement(ControlPlane& plane, int64_t step_id, std::string name);

  /// Throws PeerLostError if the job failed, because a replay makes no call that would notice it.
  /// Throws SettingsError if another rank waits to capture a call that this rank did not capture.
  void check();
  /// Call with the batch's shapes before a call runs, for messages.
  void set_last_shapes(const std::string& shapes) {
    last_shapes_ = board_ != nullptr ? shapes : "";
  }
  /// `call` has run; a rank that captures it from here on would wait forever.
  void end_call(uint64_t call) { calls_done_ = static_cast<int64_t>(call); }

  /// Announces to the other ranks that this rank captures `call`.
  CaptureReport begin_capture(uint64_t call, int64_t variant, std::string shapes);
  /// Returns the first rank's reason on all ranks; empty: all captured the same collectives. Throws
  /// SettingsError if the ranks are not in the same call.
  std::string agree(const CaptureReport& report);
  /// All ranks met to capture `call`.
  void end_capture(uint64_t call) { last_captured_ = static_cast<int64_t>(call); }

  /// Call before the control plane closes: check() does nothing afterwards.
  void end() { ended_ = true; }

 private:
  void check_missed_captures();

  ControlPlane& plane_;
  const int64_t step_id_;
  const std::string name_;
  AnnouncementBoard* const board_;  // null: nothing is exchanged
  bool ended_ = false;
  std::string last_shapes_;
  int64_t calls_done_ = 0;
  int64_t last_captured_ = 0;
  uint64_t checked_version_ = 0;  // of the announcements
};

}  // namespace ddp::detail
