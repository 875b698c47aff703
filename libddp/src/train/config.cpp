// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/config.hpp"

#include <algorithm>
#include <map>
#include <mutex>

#include "ddp/core/error.hpp"

namespace ddp {
namespace {

using detail::concat;

// The one list of the library's sections; `C` is Config or const Config.
template <typename C, typename F>
void for_each_section(C& config, F&& visit) {
  visit("train", config.train);
  visit("data", config.data);
  visit("sampler", config.sampler);
  visit("loader", config.loader);
  visit("ddp", config.ddp);
  visit("optimizer", config.optimizer);
  visit("lr_schedule", config.lr_schedule);
  visit("amp", config.amp);
  visit("checkpoint", config.checkpoint);
  visit("metrics", config.metrics);
  visit("context", config.context);
}

bool is_library_section(const std::string& name) {
  bool found = false;
  Config config;
  for_each_section(config, [&](const char* section, auto&) { found = found || name == section; });
  return found;
}

bool has_key(const SettingRows& rows, const std::string& key) {
  return std::any_of(rows.begin(), rows.end(),
                     [&](const SettingRow& row) { return row.key == key; });
}

using RowsBySection = std::map<std::string, SettingRows>;

// Of the library's sections that a program announces itself, only the keys that it has.
SettingRows library_rows(const Config& config, const RowsBySection& of_program) {
  SettingRows rows;
  for_each_section(config, [&](const char* section, const auto& options) {
    const auto own = of_program.find(section);
    for (const SettingRow& row : list_settings(section, options)) {
      if (own == of_program.end() || has_key(own->second, row.key)) {
        rows.push_back(row);
      }
    }
  });
  return rows;
}

SettingRows rows_of(const Section& section) {
  SettingRows rows;
  detail::list_settings(section.name, section.describe, rows);
  return rows;
}

// A program's defaults of the library's sections that it announces.
RowsBySection library_defaults(const std::vector<Section>& sections) {
  RowsBySection defaults;
  for (const Section& section : sections) {
    if (is_library_section(section.name)) {
      defaults[section.name] = rows_of(section);
    }
  }
  return defaults;
}

template <typename T>
void take_values(const std::string& section, const SettingRows& rows, T& options) {
  Settings values;
  values.add_yaml(settings_yaml(rows), "section " + section);
  values.read(section, options);
}

// `section` is the program's own description of one of the library's: it says which keys there are.
template <typename T>
void read_announced(Section section, Settings& settings, T& options) {
  const SettingRows defaults = rows_of(section);
  if (!defaults.empty()) {  // else there is no such section, and its keys are unknown
    settings.read_section(section.name, section.describe);
    take_values(section.name, rows_of(section), options);
  }
}

// Two keys for one number: what is left open follows the other, a file's follows an override's; two
// different values are refused otherwise.
void tie(const Settings& settings, const char* key, int64_t& value, const char* other_key,
         int64_t& other) {
  bool has = settings.has(key);
  bool has_other = settings.has(other_key);
  if (settings.is_override(key) != settings.is_override(other_key)) {
    has = settings.is_override(key);
    has_other = !has;
  }
  if (has && has_other && value != other) {
    throw SettingsError(concat(key, "=", value, " (", settings.origin(key), ") contradicts ",
                               other_key, "=", other, " (", settings.origin(other_key),
                               "): both are the samples of a rank and micro-batch; fix: set one"));
  }
  (has_other ? value : other) = has_other ? other : value;
}

std::string precision_name(AmpDtype dtype) {
  switch (dtype) {
    case AmpDtype::Bf16:
      return "bf16";
    case AmpDtype::Fp16:
      return "fp16";
    case AmpDtype::Off:
      break;
  }
  return "fp32";
}

}  // namespace

struct Config::OwnSections {
  std::mutex mutex;
  Settings settings;
  RowsBySection rows;              // of sections that were read
  RowsBySection defaults;          // of the same
  RowsBySection library_defaults;  // the program's, of library sections
};

Config::Config() : own_(std::make_shared<OwnSections>()) {}

Config Config::from_settings(Settings settings, const std::vector<Section>& own_sections) {
  Config config;
  for_each_section(config, [&](const char* name, auto& options) {
    const auto own = std::find_if(own_sections.begin(), own_sections.end(),
                                  [&](const Section& section) { return section.name == name; });
    if (own == own_sections.end()) {
      settings.read(name, options);
    } else {
      read_announced(*own, settings, options);
    }
  });
  config.own_->settings = settings;
  config.own_->library_defaults = library_defaults(own_sections);
  for (Section section : own_sections) {  // a copy: reading changes the options it holds
    if (!is_library_section(section.name)) {
      config.read_section(section.name, section.describe);
    }
  }
  if (own_sections.empty()) {
    settings.refuse_misspelled();
  } else {
    config.require_all_read();
  }
  config.fill_in(settings);
  return config;
}

Config Config::from_command_line(int argc, const char* const* argv,
                                 const std::vector<Section>& own_sections) {
  const CommandLine line = parse_command_line(argc, argv);
  Settings settings;
  if (!line.config_file.empty()) {
    settings.add_yaml_file(line.config_file);
  }
  for (const std::string& argument : line.overrides) {
    settings.add_override(argument);
  }
  return from_settings(std::move(settings), own_sections);
}

void Config::fill_in(const Settings& settings) {
  tie(settings, "train.batch_size", train.batch_size, "loader.batch_size", loader.batch_size);
  if (settings.has("train.epochs") && train.epochs > 0 && !settings.has("train.max_steps")) {
    train.max_steps = 0;
  }
  if (lr_schedule.total_steps == 0 && train.epochs == 0) {
    lr_schedule.total_steps =
        train.max_steps;  // with epochs only the program knows the run's length
  }
  validate(optimizer);
  metrics.run.precision = precision_name(amp.dtype);
  metrics.run.batch_size_per_rank = train.batch_size * train.grad_accum_steps;
  metrics.run.global_batch_size = loader.global_batch_size * train.grad_accum_steps;
  metrics.run.bucket_cap_mb = ddp.bucket_cap_mb;
  metrics.run.max_steps = train.max_steps;
  metrics.run.settings_text = to_table();
  checkpoint.settings_text = to_yaml();
}

void Config::read_section(const std::string& name,
                          const std::function<void(FieldVisitor&)>& describe) const {
  if (is_library_section(name)) {
    throw SettingsError(
        concat("Config::section(\"", name, "\"): ", name,
               " is a section of libddp; fix: name the program's section otherwise"));
  }
  const std::lock_guard lock(own_->mutex);
  SettingRows& defaults = own_->defaults[name];
  defaults.clear();
  detail::list_settings(name, describe, defaults);
  own_->settings.read_section(name, describe);
  SettingRows& rows = own_->rows[name];
  rows.clear();
  detail::list_settings(name, describe, rows);
}

void Config::require_all_read() const {
  const std::lock_guard lock(own_->mutex);
  own_->settings.require_all_read();
}

SettingRows Config::rows() const {
  const std::lock_guard lock(own_->mutex);
  SettingRows all = library_rows(*this, own_->library_defaults);
  for (const auto& [name, rows] : own_->rows) {
    all.insert(all.end(), rows.begin(), rows.end());
  }
  const SettingRows unread = own_->settings.unread_rows();
  all.insert(all.end(), unread.begin(), unread.end());
  return all;
}

SettingRows Config::default_rows(const std::vector<Section>& own_sections) {
  const RowsBySection own = library_defaults(own_sections);
  Config config;
  for_each_section(config, [&](const char* section, auto& options) {
    if (const auto found = own.find(section); found != own.end() && !found->second.empty()) {
      take_values(section, found->second, options);
    }
  });
  SettingRows rows = library_rows(config, own);
  for (const Section& section : own_sections) {
    if (!is_library_section(section.name)) {
      detail::list_settings(section.name, section.describe, rows);
    }
  }
  return rows;
}

std::string Config::to_yaml() const {
  return settings_yaml(rows());
}

std::string Config::to_table() const {
  SettingRows defaults = library_rows(Config(), {});
  {
    const std::lock_guard lock(own_->mutex);
    for (const auto& [name, own] : own_->library_defaults) {  // a later row of a key wins
      defaults.insert(defaults.end(), own.begin(), own.end());
    }
    for (const auto& [name, own] : own_->defaults) {
      defaults.insert(defaults.end(), own.begin(), own.end());
    }
  }
  return settings_table(rows(), defaults);
}

std::string Config::to_canonical() const {
  return settings_canonical(rows());
}

}  // namespace ddp
