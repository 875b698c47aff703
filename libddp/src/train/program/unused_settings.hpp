// SPDX-License-Identifier: Apache-2.0
// A setting without effect is an error: the user set it, and nothing takes it.
//
//   setting                  taken by                               refused
//   field with in_loop       uses(), or a declared section          when settings are read
//   field of a section       an object with the section's options   in the first step
//   max_steps, epochs        the program, which reads them          in the second step
//
// A loop may compare its step with the length after the first step.
// A step makes its own objects (Autocast), so the check follows the first forward of a wrapped
// model in grad mode after a step was announced. Without an announcement it follows the second
// forward, because a program may try its model first. Programs without such forwards are checked
// when they announce a second step, or at the end.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <vector>

#include "core/launch/training_state.hpp"
#include "core/settings/settings.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/usage_mark.hpp"
#include "ddp/train/config.hpp"

namespace ddp::detail {

/// Whether the program declares the section of `key`, or names one of both in uses().
inline bool is_declared(const std::vector<Section>& sections, const std::string& key) {
  return std::any_of(sections.begin(), sections.end(), [&](const Section& section) {
    const auto& used = section.used_keys;
    return section.name == section_of(key) || std::count(used.begin(), used.end(), key) > 0 ||
           std::count(used.begin(), used.end(), section_of(key)) > 0;
  });
}

/// Settings of the library that the user set and that wait for an object.
class UnusedSettings {
 public:
  UnusedSettings() = default;

  /// `marks` has the library's sections whose options objects take, and single keys that the
  /// program reads. Throws SettingsError for a setting that no object can take, and for an unknown
  /// name in uses().
  UnusedSettings(const Settings& settings, const SettingRows& rows, const SettingRows& defaults,
                 const std::vector<Section>& sections,
                 const std::map<std::string, UsageMark>& marks) {
    for (const Section& section : sections) {
      require_known(section.used_keys, rows);
    }
    for (const SettingRow& row : rows) {
      // Config copies one of these keys to the other. A program without a loader names train's.
      const bool is_batch_size = row.key == "train.batch_size" || row.key == "loader.batch_size";
      if (!settings.has(row.key) || is_declared(sections, row.key) ||
          (is_batch_size && is_declared(sections, "train.batch_size"))) {
        continue;
      }
      if (row.field.in_loop) {
        fail(row, settings.origin(row.key), "this program does not use it");
      }
      // A saved file has all keys. ddp::run takes the sections without a mark.
      if (!settings.is_override(row.key) && contains(defaults, row)) {
        continue;
      }
      const auto mark = marks.find(is_batch_size ? "loader" : section_of(row.key));
      const auto length = marks.find(row.key);
      if (mark != marks.end()) {
        waiting_.push_back({row, settings.origin(row.key),
                            "no object of libddp took the options of section " + mark->first,
                            mark->second});
      } else if (length != marks.end() && row.text() != "0") {  // 0 limits nothing
        lengths_.push_back({row, settings.origin(row.key), "this program's loop does not read it",
                            length->second});
      }
    }
  }

  /// Throws SettingsError if no object of the library received the options of a setting, or a copy.
  void require_all_taken() const { require_taken(waiting_); }
  /// Throws SettingsError if the program did not read a length that the user set.
  void require_length_read() const { require_taken(lengths_); }

 private:
  struct Waiting {
    SettingRow row;
    std::string origin;
    std::string why;  ///< for the message, if the mark is not set in time
    UsageMark mark;
  };

  static void require_taken(const std::vector<Waiting>& settings) {
    for (const auto& [row, origin, why, mark] : settings) {
      if (!mark.is_set()) {
        fail(row, origin, why);
      }
    }
  }

  static void require_known(const std::vector<std::string>& names, const SettingRows& rows) {
    for (const std::string& name : names) {
      if (std::none_of(rows.begin(), rows.end(), [&](const SettingRow& row) {
            return row.key == name || section_of(row.key) == name;
          })) {
        throw SettingsError(concat("ddp::uses: libddp has no setting or section '", name,
                                   "'; fix: name one of docs/configuration.md in the program"));
      }
    }
  }

  static bool contains(const SettingRows& rows, const SettingRow& row) {
    return std::any_of(rows.begin(), rows.end(), [&](const SettingRow& other) {
      return other.key == row.key && other.text() == row.text();
    });
  }

  [[noreturn]] static void fail(const SettingRow& row, const std::string& origin,
                                const std::string& why) {
    throw SettingsError(
        concat(origin, ": ", row.key, "=", row.text(), " has no effect: ", why,
               "; fix: leave it out, or declare it in ddp::run if the program's own code uses it: "
               "{ddp::uses({\"",
               row.key, "\"})}"));
  }

  std::vector<Waiting> waiting_, lengths_;
};

/// Calls Config::require_all_used() in the first step of a job, and require_length_used() in its
/// second one.
class FirstStepCheck {
 public:
  explicit FirstStepCheck(const Config& config) : config_(config) {
    set_step_hook([this](int64_t step) { see(step); });
  }
  ~FirstStepCheck() { set_step_hook({}); }
  FirstStepCheck(const FirstStepCheck&) = delete;
  FirstStepCheck& operator=(const FirstStepCheck&) = delete;

  /// A run that announced a step and ran no forward had no steps left, so it made no objects.
  void end_run() {
    if (first_ < 0) {
      config_.require_all_used();
    }
    config_.require_length_used();
  }
  /// False after a loop over train.epochs=0, for example. A run that resumes at its end announces
  /// the number of steps that were done, so nothing is reported although it trains nothing. A
  /// program that announced no step and ran its model without gradients only evaluates.
  bool trained_or_evaluated() const {
    return newest_ > 0 || trained_ || (first_ < 0 && evaluated_);
  }

 private:
  void see(int64_t step) {
    if (step == kEvaluationForward) {
      evaluated_ = true;
      return;
    }
    const bool is_forward = step == kTrainingForward;
    trained_ = trained_ || is_forward;
    forwards_ += is_forward && first_ < 0 ? 1 : 0;
    const bool is_due = is_forward ? first_ >= 0 || forwards_ > 1 : first_ >= 0 && step > first_;
    const bool is_second =
        is_forward ? newest_ > first_ || forwards_ > 2 : first_ >= 0 && step > first_ + 1;
    newest_ = std::max(newest_, step);
    first_ = first_ < 0 ? step : first_;
    if (is_due && !checked_.exchange(true)) {
      config_.require_all_used();
    }
    if (is_second && !length_checked_.exchange(true)) {
      config_.require_length_used();
    }
  }

  const Config& config_;
  int64_t first_ = -1;
  int forwards_ = 0;     // before a step was announced
  int64_t newest_ = -1;  // the next step; after the last step, the number of steps
  std::atomic<bool> checked_{false}, length_checked_{false}, evaluated_{false}, trained_{false};
};

}  // namespace ddp::detail
