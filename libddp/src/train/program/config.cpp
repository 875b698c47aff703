// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/config.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>

#include "core/settings/command_line.hpp"
#include "core/settings/setting_row.hpp"
#include "core/settings/settings.hpp"
#include "ddp/core/error.hpp"
#include "optim/parameter_settings.hpp"

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

template <typename T>
bool was_used(const T& options) {
  if constexpr (requires { options.usage; }) {
    return options.usage.is_set();
  } else {
    return true;  // ddp::run uses context; train's fields are checked by name
  }
}

// Fields of section train that only a program's loop uses.
bool belongs_to_loop(const std::string& key) {
  static const std::set<std::string> kKeys = {
      "train.grad_accum_steps", "train.max_grad_norm", "train.label_smoothing",  "train.mixup",
      "train.cutmix",           "train.eval_every",    "train.eval_every_steps", "train.eval_first",
      "train.eval_batch_size",  "train.cuda_graph",    "train.non_finite"};
  return kKeys.contains(key);
}

// Names that a program declares: its own sections, and the keys and sections of uses().
using Declared = std::set<std::string>;

bool is_declared(const Declared& declared, const std::string& key) {
  return declared.contains(key) || declared.contains(detail::section_of(key));
}

bool is_shown(const Declared& declared, const std::string& key) {
  return !belongs_to_loop(key) || is_declared(declared, key);
}

Declared declared_by(const std::vector<Section>& sections) {
  Declared declared;
  for (const Section& section : sections) {
    declared.insert(section.name);
    declared.insert(section.used_keys.begin(), section.used_keys.end());
  }
  return declared;
}

std::vector<Section> described(std::vector<Section> sections) {
  std::erase_if(sections, [](const Section& section) { return section.name.empty(); });
  return sections;
}

// Whether a value is the default or the derived one: a saved file has all keys.
bool is_default_or_derived(const TrainOptions& train, const SettingRows& defaults,
                           const SettingRow& row) {
  return (row.key == "lr_schedule.total_steps" && row.text() == std::to_string(train.max_steps)) ||
         std::any_of(defaults.begin(), defaults.end(), [&](const SettingRow& other) {
           return other.key == row.key && other.text() == row.text();
         });
}

[[noreturn]] void fail_unused(const SettingRow& row, const std::string& origin,
                              const std::string& why) {
  throw SettingsError(
      concat(origin, ": ", row.key, "=", row.text(), " has no effect: ", why,
             "; fix: leave it out, or declare it in ddp::run if the program's own code uses it: "
             "{ddp::uses({\"",
             row.key, "\"})}"));
}

bool is_library_section(const std::string& name) {
  bool found = false;
  Config config;
  for_each_section(
      config, [&](const char* section, auto&, const char*) { found = found || name == section; });
  return found;
}

bool has_key(const SettingRows& rows, const std::string& key) {
  return std::any_of(rows.begin(), rows.end(),
                     [&](const SettingRow& row) { return row.key == key; });
}

using RowsBySection = std::map<std::string, SettingRows>;

// Lists only the program's keys of library sections that the program announces.
SettingRows library_rows(const Config& config, const RowsBySection& of_program,
                         const Declared& declared) {
  SettingRows rows;
  for_each_section(config, [&](const char* name, const auto& options, const char* doc) {
    const auto own = of_program.find(name);
    for (SettingRow& row : list_settings(name, options)) {
      if (own == of_program.end() ? is_shown(declared, row.key) : has_key(own->second, row.key)) {
        row.section_doc = doc;
        rows.push_back(row);
      }
    }
  });
  return rows;
}

// uses() must name existing keys or sections of the library.
void require_known(const std::vector<Section>& sections) {
  Declared known;
  const Config config;
  for_each_section(config, [&](const char* name, const auto& options, const char*) {
    known.insert(name);
    for (const SettingRow& row : list_settings(name, options)) {
      known.insert(row.key);
    }
  });
  for (const Section& section : sections) {
    for (const std::string& key : section.used_keys) {
      if (known.contains(key)) {
        continue;
      }
      throw SettingsError(concat("ddp::uses: libddp has no setting or section '", key,
                                 "'; fix: name one of docs/configuration.md in the program"));
    }
  }
}

SettingRows rows_of(const Section& section) {
  SettingRows rows;
  detail::list_settings(section.name, section.describe, rows);
  for (SettingRow& row : rows) {
    row.section_doc = section.doc;
  }
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
void apply_rows(const std::string& section, const SettingRows& rows, T& options) {
  Settings values;
  values.add_rows(rows, "section " + section);
  values.read(section, options);
}

// With the program's defaults of the library's sections.
Config default_config(const RowsBySection& of_program) {
  Config config;
  for_each_section(config, [&](const char* section, auto& options, const char*) {
    const auto found = of_program.find(section);
    if (found != of_program.end() && !found->second.empty()) {
      apply_rows(section, found->second, options);
    }
  });
  return config;
}

// The defaults of the library's keys that `declared` shows, and of the program's own sections.
SettingRows default_rows_of(const std::vector<Section>& own_sections, const RowsBySection& shown,
                            const Declared& declared) {
  SettingRows rows = library_rows(default_config(library_defaults(own_sections)), shown, declared);
  for (const Section& section : own_sections) {
    if (!is_library_section(section.name)) {
      const SettingRows own = rows_of(section);
      rows.insert(rows.end(), own.begin(), own.end());
    }
  }
  return rows;
}

// `section` is the program's own description of a library section and defines its keys.
template <typename T>
void read_announced(Section section, Settings& settings, T& options) {
  const SettingRows defaults = rows_of(section);
  if (defaults.empty()) {  // there is no such section, and its keys are unknown
    return;
  }
  for (const SettingRow& row : list_settings(section.name, options)) {
    if (settings.has(row.key) && !has_key(defaults, row.key)) {
      throw SettingsError(concat(settings.origin(row.key), ": unknown setting '", row.key,
                                 "': libddp has it, but ", "this program's section ", section.name,
                                 " does not; fix: leave it out, or visit ",
                                 "it in the describe_fields of that section"));
    }
  }
  settings.read_section(section.name, section.describe);
  apply_rows(section.name, rows_of(section), options);
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
  RowsBySection defaults;          // of sections that were read
  RowsBySection library_defaults;  // the program's defaults of library sections
  Declared declared;
};

Config::Config() : own_(std::make_shared<OwnSections>()) {
  for_each_section(*this, [](const char*, auto& options, const char*) {
    if constexpr (requires { options.usage; }) {
      options.usage = detail::UsageMark::make();
    }
  });
}

Config Config::from_settings(Settings settings, const std::vector<Section>& sections) {
  Config config;
  const Declared declared = declared_by(sections);
  require_known(sections);
  const std::vector<Section> own_sections = described(sections);
  for_each_section(config, [&](const char* name, auto& options, const char*) {
    const auto own = std::find_if(own_sections.begin(), own_sections.end(),
                                  [&](const Section& section) { return section.name == name; });
    if (own == own_sections.end()) {
      settings.read(name, options);
    } else {
      read_announced(*own, settings, options);
    }
  });
  config.own_->settings = settings;
  config.own_->declared = declared;
  config.own_->library_defaults = library_defaults(own_sections);
  for (Section section : own_sections) {  // a copy, because reading changes its options
    if (!is_library_section(section.name)) {
      config.read_section(section.name, section.describe);
    }
  }
  if (own_sections.empty()) {
    settings.refuse_misspelled();
  } else {
    config.require_all_read();
  }
  for (const SettingRow& row : list_settings("train", config.train)) {
    if (settings.has(row.key) && !is_shown(declared, row.key)) {
      fail_unused(row, settings.origin(row.key), "this program does not use it");
    }
  }
  config.fill_in(settings);
  // Every default, also of settings that this program does not show: a checkpoint of another
  // version may have them.
  config.checkpoint.default_settings_text =
      settings_yaml(default_rows_of(own_sections, {}, Declared{"train"}));
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
  train.num_steps(/*steps_per_epoch=*/1);  // throws if both are 0
  if (lr_schedule.total_steps == 0 && train.epochs == 0) {
    lr_schedule.total_steps =
        train.max_steps;  // with epochs only the program knows the run's length
  }
  detail::validate(optimizer);
  metrics.configured = {.precision = precision_name(amp.dtype),
                        .amp = amp.usage,
                        .batch_size_per_rank = train.batch_size * train.grad_accum_steps,
                        .global_batch_size = loader.global_batch_size * train.grad_accum_steps,
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

void Config::require_all_used() const {
  require_all_read();
  const std::lock_guard lock(own_->mutex);
  const Settings& settings = own_->settings;
  const Declared& declared = own_->declared;
  std::set<std::string> taken;
  for_each_section(*this, [&](const char* section, const auto& options, const char*) {
    if (was_used(options)) {
      taken.insert(section);
    }
  });
  const SettingRows defaults = library_rows(Config(), {}, declared);
  for (const SettingRow& row : library_rows(*this, {}, declared)) {
    const bool is_batch_size = row.key == "train.batch_size" || row.key == "loader.batch_size";
    const std::string section = is_batch_size ? "loader" : detail::section_of(row.key);
    if (!settings.has(row.key) || taken.contains(section) || is_declared(declared, row.key) ||
        (is_batch_size && declared.contains("train.batch_size"))) {
      continue;
    }
    if (settings.is_override(row.key) || !is_default_or_derived(train, defaults, row)) {
      fail_unused(row, settings.origin(row.key),
                  concat("no object of libddp took the options of section ", section));
    }
  }
}

SettingRows Config::rows() const {
  const std::lock_guard lock(own_->mutex);
  SettingRows all = library_rows(*this, own_->library_defaults, own_->declared);
  for (const auto& [name, rows] : own_->rows) {
    all.insert(all.end(), rows.begin(), rows.end());
  }
  const SettingRows unread = own_->settings.unread_rows();
  all.insert(all.end(), unread.begin(), unread.end());
  return all;
}

SettingRows Config::default_rows(const std::vector<Section>& sections) {
  const std::vector<Section> own_sections = described(sections);
  return default_rows_of(own_sections, library_defaults(own_sections), declared_by(sections));
}

std::string Config::to_yaml() const {
  return settings_yaml(rows());
}

SettingRows Config::own_default_rows() const {
  const std::lock_guard lock(own_->mutex);
  SettingRows defaults = library_rows(Config(), {}, own_->declared);
  for (const auto& [name, own] : own_->library_defaults) {  // a later row of a key wins
    defaults.insert(defaults.end(), own.begin(), own.end());
  }
  for (const auto& [name, own] : own_->defaults) {
    defaults.insert(defaults.end(), own.begin(), own.end());
  }
  return defaults;
}

std::string Config::to_table() const {
  return settings_table(rows(), own_default_rows());
}

std::string Config::to_changed_table() const {
  SettingRows changed = changed_settings(rows(), own_default_rows());
  const std::lock_guard lock(own_->mutex);
  // Values that fill_in() derived are not the user's.
  std::erase_if(changed, [&](const SettingRow& row) { return !own_->settings.has(row.key); });
  return settings_lines(changed);
}

std::string Config::to_canonical() const {
  return settings_canonical(rows());
}

}  // namespace ddp
