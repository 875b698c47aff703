// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "ddp/core/fields.hpp"
#include "ddp/core/taken_mark.hpp"

namespace ddp {

struct CheckpointOptions {
  std::string dir = "";         ///< folder that all ranks see; empty: nothing is saved or restored
  std::string resume = "auto";  ///< auto, never, require
  int64_t every_steps = 0;      ///< 0: not by steps
  double every_minutes = 10.0;  ///< 0: not by time
  int64_t keep_last = 3;
  std::string keep_best = "off";    ///< off, min, max: of the metric passed to Checkpointer::save
  bool async = true;                ///< write from a background thread
  int64_t max_failures = 3;         ///< failed saves in a row until training ends with exit code 73
  double stop_check_seconds = 1.0;  ///< interval of the ranks' stop checks

  /// Not a setting: restore() neither makes nor removes anything in `dir` (another job may save
  /// there), and nothing is saved.
  bool read_only = false;

  // Not settings: texts saved with every checkpoint, set by ddp::Config or by the program.
  std::string settings_text{};  ///< the resolved settings
  std::string plan_text{};      ///< the measured choices, pinned on resume
  /// Not saved: the default of every setting. A resume does not report a setting with its default
  /// value that only one of the two programs knows.
  std::string default_settings_text{};
  detail::TakenMark taken{};  ///< not a setting: reports to ddp::Config that these options are used
};
void describe_fields(CheckpointOptions& options, FieldVisitor& visitor);

}  // namespace ddp
