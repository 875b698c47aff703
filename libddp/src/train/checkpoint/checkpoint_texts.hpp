// SPDX-License-Identifier: Apache-2.0
// The texts of a run's checkpoints: "settings", "plan" and the program's own.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ddp/comm/communicator.hpp"
#include "ddp/train/options.hpp"

namespace ddp::detail {

/// Lists the settings that differ: "lr_schedule.lr=0.1 (saved with 0.5)". All texts are
/// settings_yaml()'s; if one is not, the list is empty. Omitted are:
/// - sections about file locations and speed: checkpoint, metrics, context, data, loader (but
///   loader.drop_last is listed);
/// - a key that only one of `saved` and `now` has (two versions of a program), if its value is the
///   one in `defaults`. A key missing in `defaults` is listed, because its default is unknown.
std::vector<std::string> changed_settings(const std::string& saved, const std::string& now,
                                          const std::string& defaults);

/// As a manifest has it: "min", "max" or empty.
std::string to_text(KeepBest keep_best);

// For a checkpoint whose manifest does not say it, because earlier versions saved settings only:

/// Which metric is better: "min" or "max"; empty if `settings` does not say it.
std::string keep_best_in(const std::string& settings);

/// The samples of a step of all ranks. 0 if `settings` is not settings_yaml()'s text.
int64_t samples_per_step(const std::string& settings, int64_t world_size);

/// Every rank has the same texts, but rank 0 alone saves them and logs.
class CheckpointTexts {
 public:
  /// `communicator` owns the plan of measured choices, which is saved, and pinned by load().
  CheckpointTexts(const CheckpointOptions& options, std::weak_ptr<Communicator> communicator,
                  bool is_main);

  void set(const std::string& name, const std::string& text) { texts_[name] = text; }
  /// Empty if there is no such text.
  std::string get(const std::string& name) const;

  /// Takes over the texts of the checkpoint at `path`, except the settings: later checkpoints are
  /// saved with this run's. Logs each changed setting, unless read_only. Collective.
  void load(const std::map<std::string, std::string>& saved, const std::string& path);
  /// The texts of the next checkpoint. Rank 0 adds choices that were measured since the last one.
  const std::map<std::string, std::string>& collect();

 private:
  void adopt_plan(const std::string& path) const;

  const std::string default_settings_;
  const bool is_resume_;  ///< not read_only
  const std::weak_ptr<Communicator> communicator_;
  const bool is_main_;
  std::map<std::string, std::string> texts_;
};

}  // namespace ddp::detail
