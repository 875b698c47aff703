// SPDX-License-Identifier: Apache-2.0
#include "train/changed_settings.hpp"

#include <map>
#include <set>

#include "core/setting_row.hpp"
#include "core/settings.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

using ValuesByKey = std::map<std::string, std::string>;

ValuesByKey values_by_key(const std::string& yaml) {
  static const std::set<std::string> kLeftOut{"checkpoint", "metrics", "context", "data", "loader"};
  Settings settings;
  settings.add_yaml(yaml, "settings");
  ValuesByKey values;
  for (const auto& row : settings.unread_rows()) {
    const bool left_out = kLeftOut.count(row.key.substr(0, row.key.find('.'))) != 0;
    if (!left_out && !is_removed_setting(row.key)) {  // a checkpoint may be of an earlier version
      values[row.key] = row.text();
    }
  }
  return values;
}

}  // namespace

std::vector<std::string> changed_settings(const std::string& saved, const std::string& now,
                                          const std::string& defaults) {
  std::vector<std::string> changes;
  try {
    auto before = values_by_key(saved);
    const auto by_default = values_by_key(defaults);
    const auto is_default = [&](const std::string& key, const std::string& value) {
      const auto found = by_default.find(key);
      return found != by_default.end() && found->second == value;
    };
    for (const auto& [key, value] : values_by_key(now)) {
      const auto found = before.find(key);
      if (found == before.end()) {
        if (is_default(key, value)) {
          continue;
        }
        changes.push_back(concat(key, "=", value, ", it did not set that"));
      } else if (found->second != value) {
        changes.push_back(concat(key, "=", value, ", it had ", found->second));
      }
      before.erase(key);
    }
    for (const auto& [key, value] : before) {
      if (!is_default(key, value)) {
        changes.push_back(concat(key, " is not set, it had ", value));
      }
    }
  } catch (const SettingsError&) {
    changes.clear();  // a program's own text
  }
  return changes;
}

}  // namespace ddp::detail
