// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint/checkpoint_texts.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "comm/tuning/algorithm_choices.hpp"
#include "comm/tuning/group_choices.hpp"
#include "core/settings/parse_number.hpp"
#include "core/settings/setting_row.hpp"
#include "core/settings/settings.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

using ValuesByKey = std::map<std::string, std::string>;

SettingRows rows_of(const std::string& yaml) {
  Settings settings;
  settings.add_yaml(yaml, "settings");
  return settings.unread_rows();
}

ValuesByKey values_by_key(const std::string& yaml) {
  static const std::set<std::string> kLeftOut{"checkpoint", "metrics", "context", "data", "loader"};
  ValuesByKey values;
  for (const auto& row : rows_of(yaml)) {
    const bool left_out = kLeftOut.count(section_of(row.key)) != 0 && row.key != "loader.drop_last";
    if (!left_out && !is_removed_setting(row.key)) {  // a checkpoint may be of an earlier version
      values[row.key] = row.text();
    }
  }
  return values;
}

// Empty if `settings` is not settings_yaml()'s text.
ValuesByKey all_values(const std::string& settings) {
  ValuesByKey values;
  try {
    for (const auto& row : rows_of(settings)) {
      values[row.key] = row.text();
    }
  } catch (const SettingsError&) {
    return {};
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
        changes.push_back(concat(key, "=", value, " (saved without this setting)"));
      } else if (found->second != value) {
        changes.push_back(concat(key, "=", value, " (saved with ", found->second, ")"));
      }
      before.erase(key);
    }
    for (const auto& [key, value] : before) {
      if (!is_default(key, value)) {
        changes.push_back(concat(key, " is not set (saved with ", value, ")"));
      }
    }
  } catch (const SettingsError&) {
    changes.clear();  // not settings YAML, so there is nothing to compare
  }
  return changes;
}

std::string to_text(KeepBest keep_best) {
  return keep_best == KeepBest::Off ? "" : keep_best == KeepBest::Min ? "min" : "max";
}

std::string keep_best_in(const std::string& settings) {
  const auto values = all_values(settings);
  const auto found = values.find("checkpoint.keep_best");
  const bool is_known = found != values.end() && (found->second == "min" || found->second == "max");
  return is_known ? found->second : "";
}

int64_t samples_per_step(const std::string& settings, int64_t world_size) {
  const auto values = all_values(settings);
  const auto number = [&](const char* key, int64_t otherwise) {
    const auto found = values.find(key);
    return found == values.end() ? otherwise : parse_number<int64_t>(found->second).value_or(0);
  };
  const int64_t of_rank = number("train.batch_size", 0);
  const int64_t of_all = number("loader.global_batch_size", 0);
  return std::max<int64_t>(
      (of_all > 0 ? of_all : of_rank * world_size) * number("train.grad_accum_steps", 1), 0);
}

CheckpointTexts::CheckpointTexts(const CheckpointOptions& options,
                                 std::weak_ptr<Communicator> communicator, bool is_main)
    : default_settings_(options.default_settings_text),
      is_resume_(!options.read_only),
      communicator_(std::move(communicator)),
      is_main_(is_main) {
  if (!options.settings_text.empty()) {
    texts_["settings"] = options.settings_text;
  }
  if (!options.plan_text.empty()) {
    texts_["plan"] = options.plan_text;
  }
}

std::string CheckpointTexts::get(const std::string& name) const {
  const auto found = texts_.find(name);
  return found == texts_.end() ? "" : found->second;
}

void CheckpointTexts::adopt_plan(const std::string& path) const {
  const auto communicator = communicator_.lock();
  const auto plan = texts_.find("plan");
  if (plan == texts_.end() || communicator == nullptr || !is_resume_) {
    return;
  }
  try {
    communicator->choices().adopt(plan->second, path);
  } catch (const ReadError& error) {  // on all ranks; nothing of the run depends on it
    if (is_main_) {
      log_warning(concat("the plan in ", path,
                         " cannot be read, so its choices are measured again: ", error.what()));
    }
  }
}

void CheckpointTexts::load(const std::map<std::string, std::string>& saved,
                           const std::string& path) {
  const auto own = std::exchange(texts_, saved);
  if (const auto settings = own.find("settings"); settings != own.end()) {
    const auto changes = changed_settings(texts_["settings"], settings->second, default_settings_);
    for (std::size_t i = 0; i < changes.size() && is_main_ && is_resume_; ++i) {
      log_warning(concat("a setting differs from the checkpoint ", path, ": ", changes[i]));
    }
    texts_["settings"] = settings->second;
  }
  adopt_plan(path);
}

const std::map<std::string, std::string>& CheckpointTexts::collect() {
  if (const auto communicator = communicator_.lock(); communicator != nullptr && is_main_) {
    save_algorithm_choices(communicator->choices().plan());
    if (!communicator->choices().plan().empty()) {
      texts_["plan"] = communicator->choices().plan().to_json();
    }
  }
  return texts_;
}

}  // namespace ddp::detail
