// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/config.hpp"

#include <algorithm>
#include <iterator>
#include <map>

#include "core/settings/command_line.hpp"
#include "core/settings/setting_row.hpp"
#include "core/settings/settings.hpp"
#include "ddp/core/error.hpp"
#include "optim/parameter_settings.hpp"
#include "train/program/unused_settings.hpp"

namespace ddp {
namespace {

// The one list of the library's sections; `C` is Config or const Config.
template <typename C, typename F>
void for_each_section(C& config, F&& visit) {
  visit("train", config.train, "Length of the run, batch size, evaluation and numerics.");
  visit("data", config.data, "Images: folder, format, size and augmentation.");
  visit("sampler", config.sampler, "Order of the samples, and how ranks divide them.");
  visit("loader", config.loader,
        "How batches are made: threads, prefetching, decoding, GPU memory.");
  visit("ddp", config.ddp, "Reduction of gradients: buckets, compression, unused parameters.");
  visit("optimizer", config.optimizer, "Update rule and its constants, ZeRO-1, parameter groups.");
  visit("lr_schedule", config.lr_schedule, "Learning rate over the steps of the run.");
  visit("amp", config.amp, "Mixed precision: autocast and loss scale.");
  visit("checkpoint", config.checkpoint, "Saving and resuming.");
  visit("metrics", config.metrics, "Log lines, progress, CSV and JSONL files, traces.");
  visit("context", config.context, "Device, seed, communicator and connections between ranks.");
}

bool is_library_section(const std::string& name) {
  bool found = false;
  const Config config;
  for_each_section(config, [&](const char* section, const auto&, const char*) {
    found = found || name == section;
  });
  return found;
}

// uses() gives sections without a name.
bool is_custom(const Section& section) {
  return !section.name.empty() && !is_library_section(section.name);
}

const Section* find_section(const std::vector<Section>& sections, const std::string& name) {
  const auto found = std::find_if(sections.begin(), sections.end(),
                                  [&](const Section& section) { return section.name == name; });
  return found == sections.end() ? nullptr : &*found;
}

bool has_key(const SettingRows& rows, const std::string& key) {
  return std::any_of(rows.begin(), rows.end(),
                     [&](const SettingRow& row) { return row.key == key; });
}

void append(SettingRows& rows, SettingRows more, const std::string& doc = {}) {
  for (SettingRow& row : more) {
    row.section_doc = doc;
    rows.push_back(std::move(row));
  }
}

SettingRows rows_of(const Section& section) {
  SettingRows rows;
  detail::list_settings(section.name, section.describe, rows);
  return rows;
}

// Sets the fields of `options` that `section` describes to its values.
template <typename T>
void apply(const Section& section, T& options) {
  Settings values;
  values.add_rows(rows_of(section), "section " + section.name);
  values.read(section.name, options);
}

SettingRows library_rows(const Config& config) {
  SettingRows rows;
  for_each_section(config, [&](const char* name, const auto& options, const char* doc) {
    append(rows, list_settings(name, options), doc);
  });
  return rows;
}

// The defaults of all keys, also of those that the program hides.
SettingRows all_default_rows(const std::vector<Section>& sections) {
  Config config;
  for_each_section(config, [&](const char* name, auto& options, const char*) {
    if (const Section* declared = find_section(sections, name)) {
      apply(*declared, options);
    }
  });
  SettingRows rows = library_rows(config);
  for (const Section& section : sections) {
    if (is_custom(section)) {
      append(rows, rows_of(section), section.doc);
    }
  }
  return rows;
}

// Whether the user of the program can set `row`.
bool is_visible(const SettingRow& row, const std::vector<Section>& sections) {
  const Section* declared = find_section(sections, detail::section_of(row.key));
  return declared != nullptr ? has_key(rows_of(*declared), row.key)
                             : !row.field.in_loop || detail::is_declared(sections, row.key);
}

// Reads a section of the library whose keys and defaults the program declares.
template <typename T>
void read_declared(Section section, Settings& settings, T& options) {
  const SettingRows defaults = rows_of(section);
  if (defaults.empty()) {  // there is no such section, and its keys are unknown
    return;
  }
  for (const SettingRow& row : list_settings(section.name, options)) {
    if (settings.has(row.key) && !has_key(defaults, row.key)) {
      throw SettingsError(concat(settings.origin(row.key), ": unknown setting '", row.key,
                                 "': libddp has it, but this program's section ", section.name,
                                 " does not; fix: leave it out, or visit it in the describe_fields "
                                 "of that section"));
    }
  }
  settings.read_section(section.name, section.describe);
  apply(section, options);
}

// Two keys for one number. An unset key follows the other one, and a file's key follows an
// override. Two different values are refused otherwise.
void tie(const Settings& settings, const char* key, int64_t& value, const char* other_key,
         int64_t& other) {
  bool has = settings.has(key);
  bool has_other = settings.has(other_key);
  if (settings.is_override(key) != settings.is_override(other_key)) {
    has = settings.is_override(key);
    has_other = !has;
  }
  if (has && has_other && value != other) {
    throw SettingsError(
        concat(key, "=", value, " (", settings.origin(key), ") contradicts ", other_key, "=", other,
               " (", settings.origin(other_key),
               "): both are the samples per rank and micro-batch; fix: set only one"));
  }
  (has_other ? value : other) = has_other ? other : value;
}

// A shared global batch decides alone. A file with both is one that a run saved.
void require_one_batch(const Settings& settings, const LoaderOptions& loader) {
  constexpr const char* kGlobal = "loader.global_batch_size";
  for (const char* key : {"train.batch_size", "loader.batch_size"}) {
    if (loader.global_batch_size > 0 && settings.has(key) &&
        (settings.is_override(key) || !settings.has(kGlobal))) {
      throw SettingsError(
          concat(key, " (", settings.origin(key), ") has no effect on training, because ", kGlobal,
                 "=", loader.global_batch_size,
                 settings.has(kGlobal) ? concat(" (", settings.origin(kGlobal), ")")
                                       : std::string(" (this program's default)"),
                 " is shared by all ranks; fix: also set ", kGlobal, "=0, or leave out ", key,
                 " (evaluations have train.eval_batch_size)"));
    }
  }
}

}  // namespace

struct Config::State {
  Settings settings;
  std::vector<Section> sections;  // as the program declares them
  std::vector<Section> custom;    // its own ones, with the user's values
  detail::UnusedSettings unused;
};

Config::Config() : state_(std::make_shared<State>()) {
  for_each_section(*this, [](const char*, auto& options, const char*) {
    if constexpr (requires { options.usage; }) {
      options.usage = detail::UsageMark::make();
    }
  });
}

Config Config::from_settings(Settings settings, const std::vector<Section>& sections) {
  Config config;
  std::map<std::string, detail::UsageMark> marks;
  settings.suggest(default_rows(sections));
  for_each_section(config, [&](const char* name, auto& options, const char*) {
    if (const Section* declared = find_section(sections, name)) {
      read_declared(*declared, settings, options);
    } else {
      settings.read(name, options);
    }
    if constexpr (requires { options.usage; }) {
      marks[name] = options.usage;
    }
  });
  State& state = *config.state_;
  state.sections = sections;
  std::copy_if(sections.begin(), sections.end(), std::back_inserter(state.custom), is_custom);
  for (const Section& section : state.custom) {
    settings.read_section(section.name, section.describe);
  }
  settings.require_all_read();
  state.settings = std::move(settings);
  config.derive();
  SettingRows defaults = all_default_rows(sections);
  // Another version's checkpoint may have settings that this program hides.
  config.checkpoint.default_settings_text = settings_yaml(defaults);
  append(defaults,
         list_settings("lr_schedule", LrScheduleOptions{.total_steps = config.train.max_steps}));
  // From here on only the program reads them.
  marks["train.max_steps"] = config.train.max_steps.watch();
  marks["train.epochs"] = config.train.epochs.watch();
  state.unused = {state.settings, library_rows(config), defaults, sections, marks};
  return config;
}

Config Config::from_command_line(int argc, const char* const* argv,
                                 const std::vector<Section>& sections) {
  const CommandLine line = parse_command_line(argc, argv);
  Settings settings;
  if (!line.config_file.empty()) {
    settings.add_yaml_file(line.config_file);
  }
  for (const std::string& argument : line.overrides) {
    settings.add_override(argument);
  }
  Config config = from_settings(std::move(settings), sections);
  config.ddp.logs_summary = line.summary;
  return config;
}

void Config::derive() {
  const Settings& settings = state_->settings;
  tie(settings, "train.batch_size", train.batch_size, "loader.batch_size", loader.batch_size);
  require_one_batch(settings, loader);
  if (settings.has("train.epochs") && train.epochs > 0 && !settings.has("train.max_steps")) {
    train.max_steps = 0;
  }
  train.num_steps(/*steps_per_epoch=*/1);  // throws if both are 0
  if (lr_schedule.total_steps == 0 && train.epochs == 0) {
    lr_schedule.total_steps =
        train.max_steps;  // with epochs only the program knows the run's length
  }
  detail::validate(optimizer);
  const char* half = amp.dtype == AmpDtype::Bf16 ? "bf16" : "fp16";
  metrics.configured = {.precision = amp.dtype == AmpDtype::Off ? "fp32" : half,
                        .amp = amp.usage,
                        .batch_size = train.batch_size,
                        .global_batch_size = loader.global_batch_size,
                        .grad_accum_steps = train.grad_accum_steps,
                        .loader = loader.usage,
                        .bucket_cap_mb = ddp.bucket_cap_mb.value_or(0),
                        .ddp = ddp.usage};
  metrics.run.settings_text = to_table();
  checkpoint.settings_text = to_yaml();
}

void Config::read_section(const std::string& name,
                          const std::function<void(FieldVisitor&)>& describe) const {
  if (is_library_section(name)) {
    throw SettingsError(
        concat("Config::section(\"", name, "\"): ", name, " is a section of libddp; fix: read cfg.",
               name, ", which has the defaults that the program declares for it, or give the ",
               "program's section another name"));
  }
  if (find_section(state_->custom, name) == nullptr) {
    throw SettingsError(concat("Config::section(\"", name, "\"): the program does not declare it, ",
                               "so users cannot set it; fix: give ddp::run {ddp::declare_section<",
                               "Options>(\"", name, "\")}"));
  }
  Settings settings = state_->settings;
  settings.read_section(name, describe);
}

void Config::require_all_used() const {
  state_->unused.require_all_taken();
}

void Config::require_length_used() const {
  state_->unused.require_length_read();
}

SettingRows Config::rows() const {
  SettingRows rows = library_rows(*this);
  std::erase_if(rows, [&](const SettingRow& row) { return !is_visible(row, state_->sections); });
  for (const Section& section : state_->custom) {
    append(rows, rows_of(section), section.doc);
  }
  return rows;
}

SettingRows Config::default_rows(const std::vector<Section>& sections) {
  SettingRows rows = all_default_rows(sections);
  std::erase_if(rows, [&](const SettingRow& row) { return !is_visible(row, sections); });
  return rows;
}

std::vector<Section> only_sections(const std::vector<std::string>& names,
                                   std::vector<Section> sections) {
  const Config config;
  std::vector<std::string> all;
  std::vector<Section> hidden;  // sections without keys
  for_each_section(config, [&](const char* name, const auto&, const char*) {
    all.emplace_back(name);
    if (all.back() != "context" && std::count(names.begin(), names.end(), name) == 0 &&
        find_section(sections, name) == nullptr) {
      hidden.push_back({name, [](FieldVisitor&) {}});
    }
  });
  for (const std::string& name : names) {
    if (std::count(all.begin(), all.end(), name) == 0) {
      throw SettingsError(concat("ddp::only_sections: libddp has no section '", name,
                                 "'; fix: name some of ", detail::join(all, ", ")));
    }
  }
  sections.insert(sections.end(), hidden.begin(), hidden.end());
  return sections;
}

std::string Config::to_yaml() const {
  return settings_yaml(rows());
}

std::string Config::to_table() const {
  return settings_table(rows(), default_rows(state_->sections));
}

std::string Config::to_changed_table() const {
  SettingRows changed = changed_settings(rows(), default_rows(state_->sections));
  // derive() sets values that the user did not.
  std::erase_if(changed, [&](const SettingRow& row) { return !state_->settings.has(row.key); });
  return settings_lines(changed);
}

std::string Config::to_canonical() const {
  return settings_canonical(rows());
}

}  // namespace ddp
