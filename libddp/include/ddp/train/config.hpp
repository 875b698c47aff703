// SPDX-License-Identifier: Apache-2.0
// All settings of a run: one YAML file, then key=value overrides.
//
//   train --config run.yaml train.batch_size=128 amp.dtype=bf16
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/amp/amp.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/core/fields.hpp"
#include "ddp/data/options.hpp"
#include "ddp/optim/lr_schedule.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/options.hpp"
#include "ddp/train/options.hpp"

namespace ddp {

class Settings;
struct SettingRow;

class Config {
 public:
  ContextOptions context;
  DdpOptions ddp;
  OptimizerOptions optimizer;
  LrScheduleOptions lr_schedule;
  AmpOptions amp;
  DataOptions data;
  SamplerOptions sampler;
  LoaderOptions loader;
  MetricsOptions metrics;
  CheckpointOptions checkpoint;
  TrainOptions train;

  Config();  ///< the defaults

  /// Reads all sections above from "[--config FILE] [key=value ...]" and checks every key and
  /// value. Ignores --help and the other options that ddp::run reads. Throws SettingsError.
  ///
  /// If `own_sections` declares sections, an unknown key is an error. A section with a library
  /// section's name sets the defaults of the keys that it describes, for the member of this class;
  /// the library's other keys of that section are then unknown. Without declared sections unknown
  /// ones are kept for section(), and a name close to a library key is an error. grad_accum_steps,
  /// max_grad_norm, non_finite, label_smoothing, mixup, cutmix, cuda_graph and eval_… of section
  /// train are refused unless uses() names them or the program declares section train.
  ///
  /// Fills in unset settings: loader.batch_size and train.batch_size from each other, and
  /// lr_schedule.total_steps from train.max_steps. If only train.epochs is set, max_steps is 0.
  static Config from_command_line(int argc, const char* const* argv,
                                  const std::vector<Section>& own_sections = {});

  /// The program's own settings: defaults of `T`, which has describe_fields(T&, FieldVisitor&),
  /// overridden by keys under "<name>.". Throws SettingsError for wrong values and unknown keys.
  template <typename T>
  T section(const std::string& name) const {
    T options{};
    read_section(name, [&](FieldVisitor& visitor) { detail::describe(options, visitor); });
    return options;
  }

  /// Throws if neither the library nor the program read a key. ddp::run calls it when the first
  /// step begins.
  void require_all_read() const;
  /// Also throws if a setting has no effect: no libddp object received its section's options (or a
  /// copy), uses() does not name it, and the program does not declare its section. A settings file
  /// may hold default or derived values. ddp::run calls it after the first step and at the end.
  void require_all_used() const;

  /// YAML for --config that reproduces the run, with the program sections that section() has read.
  std::string to_yaml() const;
  std::string to_table() const;  ///< all settings; a star marks values other than the default
  std::string to_changed_table() const;  ///< only settings that the user changed

  // For libddp's own parts and tools (src/core/settings.hpp).
  static Config from_settings(Settings settings, const std::vector<Section>& own_sections = {});
  static std::vector<SettingRow> default_rows(const std::vector<Section>& own_sections = {});
  std::vector<SettingRow> rows() const;
  /// Sorted key=value lines to compare ranks, without settings that may differ (folders).
  std::string to_canonical() const;

 private:
  struct OwnSections;
  void read_section(const std::string& name,
                    const std::function<void(FieldVisitor&)>& describe) const;
  void fill_in(const Settings& settings);
  std::vector<SettingRow> own_default_rows() const;

  std::shared_ptr<OwnSections> own_;  ///< shared by copies: a section read in one is read in all
};

}  // namespace ddp
