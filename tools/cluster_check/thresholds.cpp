// SPDX-License-Identifier: Apache-2.0
#include "thresholds.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <set>
#include <vector>

#include "core/settings/settings.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/text.hpp"
#include "report.hpp"
#include "shipped_thresholds.hpp"

namespace cluster_check {
namespace {

/// The shipped set for a GPU of this name; empty if there is none. The sets are those of SXM
/// modules.
std::string set_of(const std::string& gpu_name) {
  if (gpu_name.empty()) {
    return "cpu";
  }
  for (const char* other : {"PCI", "NVL", "GH"}) {
    if (gpu_name.find(other) != std::string::npos) {
      return "";
    }
  }
  for (const auto& [part, set] : {std::pair{"A100", "a100"}, {"H100", "h100"}, {"H200", "h200"}}) {
    if (gpu_name.find(part) != std::string::npos) {
      return set;
    }
  }
  return "";
}

std::string list_of_sets() {
  std::string text;
  for (const auto& [name, yaml] : kShippedThresholds) {
    text += (text.empty() ? "" : ", ") + std::string(name);
  }
  return text;
}

/// Nothing if `settings` has no limit for `check`.
std::optional<double> read_limit(const ddp::Settings& settings, const Check& check,
                                 ddp::FieldVisitor& visitor) {
  const auto key = check.group + "." + check.name;
  double value = 0;
  bool good = true;
  try {
    visitor.field({.name = check.name, .doc = check.doc, .unit = check.unit, .min = 0}, value);
    good = std::isfinite(value);
  } catch (const ddp::SettingsError&) {  // its message proposes a default, which a limit has not
    good = false;
  }
  if (!good) {
    throw ddp::SettingsError(ddp::concat(
        settings.origin(key), ": ", key, ": expected a finite number of at least 0",
        check.unit.empty() ? "" : " (" + check.unit + ")", "; fix: correct it or leave it out"));
  }
  return settings.has(key) ? std::optional(value) : std::nullopt;
}

bool has_limit_for_all(const Row& row) {
  const auto* check = find_check(row.group, row.name);
  return row.group == "gpu" && row.percent_below_median.has_value() &&
         (check == nullptr || check->limit == Limit::Min);
}

/// Compares the ranks of each row of group "gpu".
void set_distances(Report& report) {
  std::map<std::string, std::vector<double>> values;
  for (const auto& row : report.rows) {
    if (row.group == "gpu" && row.rank != kAllRanks && row.value) {
      values[row.name].push_back(*row.value);
    }
  }
  for (auto& row : report.rows) {
    const auto found = values.find(row.name);
    if (row.group != "gpu" || !row.value || found == values.end() || found->second.size() < 2) {
      continue;
    }
    const double median = median_of(found->second);
    row.percent_below_median = median > 0 ? 100 * (median - *row.value) / median : 0;
  }
}

std::string number(double value) {
  ddp::detail::TextStream out;
  out.precision(6);
  out << value;
  return out.str();
}

/// Rounds to three digits, to the side that lets `value` pass.
double rounded(double value, Limit limit) {
  if (value == 0) {
    return 0;
  }
  const double scale = std::pow(10, 2 - std::floor(std::log10(std::abs(value))));
  return (limit == Limit::Min ? std::floor(value * scale) : std::ceil(value * scale)) / scale;
}

}  // namespace

Thresholds Thresholds::load(const std::string& choice, const std::string& gpu_name) {
  Thresholds result;
  if (choice.empty()) {
    throw ddp::SettingsError(
        "cluster_check: thresholds= is empty; fix: name a set or a file, or "
        "write none to check no threshold");
  }
  result.name_ = choice == "auto" ? set_of(gpu_name) : choice;
  if (result.name_.empty()) {
    result.name_ = "none (no set for " + gpu_name + ")";
  } else if (choice != "none") {
    try {
      result.read(result.name_);
    } catch (const ddp::SettingsError& error) {
      throw ddp::SettingsError("cluster_check: thresholds=" + choice + ": " + error.what());
    }
  }
  return result;
}

void Thresholds::read(const std::string& wanted) {
  ddp::Settings settings;
  const auto* shipped =
      std::find_if(std::begin(kShippedThresholds), std::end(kShippedThresholds),
                   [&](const ShippedThresholds& set) { return wanted == set.name; });
  if (shipped != std::end(kShippedThresholds)) {
    settings.add_yaml(shipped->yaml, wanted + ".yaml");
  } else if (std::filesystem::is_regular_file(wanted)) {
    settings.add_yaml_file(wanted);
  } else {
    throw ddp::SettingsError("it is neither a file nor one of auto, none, " + list_of_sets());
  }
  std::set<std::string> groups;
  for (const auto& check : checks()) {
    groups.insert(check.group);
  }
  for (const auto& group : groups) {
    settings.read_section(group, [&](ddp::FieldVisitor& visitor) {
      for (const auto& check : checks()) {
        if (check.group != group) {
          continue;
        }
        if (const auto limit = read_limit(settings, check, visitor)) {
          values_[{check.group, check.name}] = *limit;
        }
      }
    });
  }
  settings.require_all_read();
  if (values_.empty()) {
    throw ddp::SettingsError("the file sets no limit; fix: write thresholds=none to check none");
  }
}

const double* Thresholds::find(const std::string& group, const std::string& name) const {
  const auto found = values_.find({group, name});
  return found == values_.end() ? nullptr : &found->second;
}

void Thresholds::judge(Report& report) const {
  set_distances(report);
  for (auto& row : report.rows) {
    bool checked = false, good = true;
    const auto* check = find_check(row.group, row.name);
    const double* limit = check ? find(row.group, row.name) : nullptr;
    const bool is_min = check && check->limit == Limit::Min;
    row.threshold = limit ? (is_min ? "at least " : "at most ") + number(*limit) : "";
    if (!row.value) {
      row.verdict = Verdict::NotAvailable;
      continue;
    }
    if (limit) {
      checked = true;
      good = is_min ? *row.value >= *limit : *row.value <= *limit;
    }
    if (const double* most =
            has_limit_for_all(row) ? find("gpu", "percent_below_median") : nullptr) {
      row.threshold += (row.threshold.empty() ? "" : ", ") + std::string("at most ") +
                       number(*most) + " % below the median";
      checked = true;
      good = good && *row.percent_below_median <= *most;
    }
    row.verdict = !checked ? Verdict::Unchecked : good ? Verdict::Pass : Verdict::Fail;
  }
  count_met(report);
}

void Thresholds::count_met(Report& report) const {
  for (const auto& [key, limit] : values_) {
    const auto& [group, name] = key;
    const bool is_for_all = group == "gpu" && name == "percent_below_median";
    bool measured = false, good = true;
    for (const auto& row : report.rows) {
      if (is_for_all ? has_limit_for_all(row)
                     : row.group == group && row.name == name && row.value.has_value()) {
        measured = true;
        good = good && row.verdict != Verdict::Fail;
      }
    }
    if (!measured) {
      report.not_measured.push_back(group + "." + name);
    } else if (good) {
      ++report.num_met;
    }
  }
}

std::string make_thresholds(const Report& report, const Thresholds& base) {
  ddp::detail::TextStream out;
  out << "# Thresholds of cluster_check, from a run on " << report.ranks.size() << " rank(s) of "
      << (report.ranks[0].gpu_name.empty() ? "CPUs" : report.ranks[0].gpu_name) << ", "
      << report.started << " UTC.\n";
  std::string group;
  for (const auto& check : checks()) {
    std::optional<double> limit;
    if (check.margin < 0) {
      if (const double* fixed = base.find(check.group, check.name)) {
        limit = *fixed;
      }
    } else {
      for (const auto& row : report.rows) {
        if (row.group != check.group || row.name != check.name || !row.value) {
          continue;
        }
        const bool is_min = check.limit == Limit::Min;
        const double moved = *row.value * (is_min ? 1 - check.margin : 1 + check.margin);
        limit = !limit ? moved : is_min ? std::min(*limit, moved) : std::max(*limit, moved);
      }
      if (limit) {
        limit = rounded(*limit, check.limit);
      }
    }
    if (!limit) {
      continue;
    }
    if (group != check.group) {
      group = check.group;
      out << group << ":\n";
    }
    out << "  " << check.name << ": " << number(*limit) << "  # "
        << (check.limit == Limit::Min ? "at least" : "at most") << (check.unit.empty() ? "" : ", ")
        << check.unit << ": " << check.doc << '\n';
  }
  return out.str();
}

}  // namespace cluster_check
