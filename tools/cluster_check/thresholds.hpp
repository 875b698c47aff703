// SPDX-License-Identifier: Apache-2.0
// Thresholds of the checks: YAML files, shipped ones, and files made from a run.
#pragma once

#include <map>
#include <string>
#include <utility>

#include "checks.hpp"
#include "row.hpp"

namespace cluster_check {

class Thresholds {
 public:
  /// `choice` is a file, the name of a shipped set, "none", or "auto": the set of `gpu_name`
  /// (empty: the CPU's). Throws SettingsError, also for unknown keys and a file without limits.
  static Thresholds load(const std::string& choice, const std::string& gpu_name);

  /// nullptr if there is none.
  const double* find(const std::string& group, const std::string& name) const;
  const std::string& name() const { return name_; }

  /// Sets threshold, distance from the median and verdict of every row, and which thresholds are
  /// met or not measured.
  void judge(Report& report) const;

 private:
  void read(const std::string& choice);
  void count_met(Report& report) const;

  std::string name_;
  std::map<std::pair<std::string, std::string>, double> values_;
};

/// YAML that the run of `report` passes: fixed requirements as in `base`, measured ones with their
/// margin.
std::string make_thresholds(const Report& report, const Thresholds& base);

}  // namespace cluster_check
