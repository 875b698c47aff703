// SPDX-License-Identifier: Apache-2.0
// Messages between ranks when a step is captured. Every rank decides alone whether a call captures
// or replays. A rank that decided otherwise must be notified; waiting for it would hang.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddp::detail {

/// One rank's capture. Equal steps in equal order have equal numbers on all ranks.
struct CaptureReport {
  int64_t step_id = 0;                       ///< which of the program's GraphedSteps
  int64_t call = 0;                          ///< index of this call of the step
  int64_t variant = 0;                       ///< StepNumbers::variant
  std::string shapes = {};                   ///< of the batch, for messages
  std::string reason = {};                   ///< why it failed; empty: success
  std::vector<std::string> operations = {};  ///< its collectives, in order
};

std::string encode(const CaptureReport& report);
/// False if the text is no report: the rank was in another collective of the control plane.
bool decode(const std::string& text, CaptureReport& report);

/// Compares the `texts` of all ranks at rank `own`'s capture of the step called `name`. Returns the
/// first rank's reason why no rank replays; empty: all captured the same collectives. Throws
/// SettingsError on every rank if the ranks were not in the same call.
std::string compare_captures(const std::vector<std::string>& texts, size_t own,
                             const std::string& name);

/// `notes` are the reports that ranks posted before their last captures, before waiting for the
/// others. On this rank `calls_done` calls of step `step_id` are done, and `last_captured` was the
/// last captured one. Throws SettingsError if a rank captures a call that this rank ran without a
/// capture: that rank would wait forever. `shapes` are those of the last batch here. Returns true
/// if a rank captures a later call of this rank, so the same notes must be checked again.
bool require_no_missed_capture(const std::vector<std::string>& notes, size_t own, int64_t step_id,
                               int64_t calls_done, int64_t last_captured, const std::string& name,
                               const std::string& shapes);

}  // namespace ddp::detail
