// SPDX-License-Identifier: Apache-2.0
// What the ranks tell each other when a step is captured. Every rank decides by itself whether a
// call captures or replays; a rank that decided otherwise must be told, not waited for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddp::detail {

/// One rank's capture. The same steps in the same order have the same numbers on all ranks.
struct CaptureReport {
  int64_t step_id = 0;                       ///< which of the program's GraphedSteps
  int64_t call = 0;                          ///< its how-manieth
  int64_t variant = 0;                       ///< StepNumbers::variant
  std::string shapes = {};                   ///< of the batch, for messages
  std::string reason = {};                   ///< why it failed; empty: it did not
  std::vector<std::string> operations = {};  ///< its collectives, in order
};

std::string encode(const CaptureReport& report);
/// False where the text is no report: the rank was in another collective of the control plane.
bool decode(const std::string& text, CaptureReport& report);

/// `texts` is what each rank gave at rank `own`'s capture of the step called `name`. Returns the
/// first rank's reason why none replays; empty: all captured the same collectives. Throws
/// SettingsError, on every rank that asks, where the ranks were not in the same call.
std::string compare_captures(const std::vector<std::string>& texts, size_t own,
                             const std::string& name);

/// `notes` are the reports that ranks left before their last captures, before they waited for the
/// others. `calls_done` calls of step `step_id` are over here, and the last one that was captured
/// was `last_captured`. Throws SettingsError where a rank captures a call that went by here: it
/// waits for ever. `shapes` are those of the last batch here. True: a rank captures a call that is
/// still to come here, so that the same notes must be looked at again.
bool require_no_missed_capture(const std::vector<std::string>& notes, size_t own, int64_t step_id,
                               int64_t calls_done, int64_t last_captured, const std::string& name,
                               const std::string& shapes);

}  // namespace ddp::detail
