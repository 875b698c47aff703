// SPDX-License-Identifier: Apache-2.0
// A setting without effect is an error: the user set it, and nothing takes it.
//
//   setting                  taken by                               refused
//   field with in_loop       uses(), or a declared section          when settings are read
//   field of a section       an object with the section's options   in the first step
//
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

  /// `marks` has the library's sections whose options objects take. Throws SettingsError for a
  /// setting that no object can take, and for an unknown name in uses().
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
      const auto mark = marks.find(is_batch_size ? "loader" : section_of(row.key));
      // A saved file has all keys. ddp::run takes the sections without a mark.
      const bool counts = settings.is_override(row.key) || !contains(defaults, row);
      if (mark != marks.end() && counts) {
        waiting_.push_back({row, settings.origin(row.key), mark->first, mark->second});
      }
    }
  }

  /// Throws SettingsError if no object of the library received the options of a setting, or a copy.
  void require_all_taken() const {
    for (const auto& [row, origin, section, mark] : waiting_) {
      if (!mark.is_set()) {
        fail(row, origin, concat("no object of libddp took the options of section ", section));
      }
    }
  }

 private:
  struct Waiting {
    SettingRow row;
    std::string origin, section;
    UsageMark mark;
  };

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

  std::vector<Waiting> waiting_;
};

/// Calls Config::require_all_used() in the first step of a job.
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
  }
  /// False after a loop over train.epochs=0, for example. A run that resumes at its end announces
  /// the number of steps that were done, so nothing is reported although it trains nothing.
  bool saw_a_step() const { return newest_ > 0; }

 private:
  void see(int64_t step) {
    const bool is_due = step < 0 ? first_ >= 0 || ++forwards_ > 1 : first_ >= 0 && step > first_;
    newest_ = std::max(newest_, step);
    first_ = first_ < 0 ? step : first_;
    if (is_due && !checked_.exchange(true)) {
      config_.require_all_used();
    }
  }

  const Config& config_;
  int64_t first_ = -1;
  int forwards_ = 0;     // before a step was announced
  int64_t newest_ = -1;  // the next step; after the last step, the number of steps
  std::atomic<bool> checked_{false};
};

}  // namespace ddp::detail
