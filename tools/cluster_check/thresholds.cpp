// SPDX-License-Identifier: Apache-2.0
#include "thresholds.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>
#include <sstream>
#include <vector>

#include "core/settings.hpp"
#include "ddp/core/error.hpp"
#include "report.hpp"
#include "shipped_thresholds.hpp"

namespace cluster_check {
namespace {

/// The shipped set for a GPU of this name; empty if there is none.
std::string set_of(const std::string& gpu_name) {
  if (gpu_name.empty()) {
    return "cpu";
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

bool has_limit_for_all(const Row& row) {
  return row.group == "gpu" && row.percent_below_median.has_value();
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
  std::ostringstream out;
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
  const std::string wanted = choice == "auto" ? set_of(gpu_name) : choice;
  if (wanted.empty() || wanted == "none") {
    result.name_ = wanted.empty() ? "none (no set for " + gpu_name + ")" : wanted;
    return result;
  }
  ddp::Settings settings;
  const auto* shipped =
      std::find_if(std::begin(kShippedThresholds), std::end(kShippedThresholds),
                   [&](const ShippedThresholds& set) { return wanted == set.name; });
  if (shipped != std::end(kShippedThresholds)) {
    settings.add_yaml(shipped->yaml, wanted + ".yaml");
  } else if (std::filesystem::exists(wanted)) {
    settings.add_yaml_file(wanted);
  } else {
    throw ddp::SettingsError("cluster_check: thresholds=" + wanted +
                             " is neither a file nor one of auto, none, " + list_of_sets());
  }
  result.name_ = wanted;
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
        ddp::NumberOrAuto value;
        visitor.field({.name = check.name, .doc = check.doc, .unit = check.unit, .min = 0}, value);
        if (value) {
          result.values_[{check.group, check.name}] = *value;
        }
      }
    });
  }
  settings.require_all_read();
  return result;
}

const double* Thresholds::find(const std::string& group, const std::string& name) const {
  const auto found = values_.find({group, name});
  return found == values_.end() ? nullptr : &found->second;
}

void Thresholds::judge(Report& report) const {
  set_distances(report);
  for (auto& row : report.rows) {
    if (!row.value) {
      row.verdict = Verdict::NotAvailable;
      continue;
    }
    bool checked = false, good = true;
    const auto* check = find_check(row.group, row.name);
    if (const double* limit = check ? find(row.group, row.name) : nullptr) {
      const bool is_min = check->limit == Limit::Min;
      row.threshold = (is_min ? "at least " : "at most ") + number(*limit);
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
}

std::string make_thresholds(const Report& report, const Thresholds& base) {
  std::ostringstream out;
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
