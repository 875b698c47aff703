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
#include "ddp/reduce/data_parallel_model.hpp"
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
  /// value. Ignores --help. Throws SettingsError.
  ///
  /// If `own_sections` announces the program's sections, any other key is refused here. If one has
  /// the name of a library section, only the declared keys of it exist, with the program's
  /// defaults. Without `own_sections`, keys of other sections stay unread, unless they look
  /// misspelled. grad_accum_steps, max_grad_norm, non_finite, label_smoothing, mixup, cuda_graph
  /// and eval_… of section train exist only if uses() names them or the program announces section
  /// train.
  ///
  /// Unset settings are derived: loader.batch_size from train.batch_size (and back);
  /// lr_schedule.total_steps from train.max_steps; train.max_steps=0 if only train.epochs is set.
  static Config from_command_line(int argc, const char* const* argv,
                                  const std::vector<Section>& own_sections = {});

  /// The program's own settings: defaults of `T`, which has describe_fields(T&, FieldVisitor&),
  /// overridden by keys under "<name>.". Throws SettingsError for wrong values and unknown keys.
  template <typename T>
  T section(const std::string& name) const {
    T options{};
    read_section(name, [&](FieldVisitor& visitor) { describe_fields(options, visitor); });
    return options;
  }

  /// Refuses keys that neither the library nor the program read. ddp::run calls it when the first
  /// step begins.
  void require_all_read() const;
  /// Like require_all_read(), and also refuses settings without effect, naming the fix: no object
  /// of the library took its section's options (or copies), uses() does not name it, and the
  /// program did not announce the section. Default and derived values, as to_yaml() writes them,
  /// are allowed. ddp::run calls it after the first step and at the end.
  void require_all_used() const;

  std::string to_yaml() const;   ///< for --config: reproduces the run, with sections read so far
  std::string to_table() const;  ///< for a log; a star marks values other than the default

  // For libddp's own parts and tools (src/core/settings.hpp).
  static Config from_settings(Settings settings, const std::vector<Section>& own_sections = {});
  static std::vector<SettingRow> default_rows(const std::vector<Section>& own_sections = {});
  std::vector<SettingRow> rows() const;
  /// Sorted key=value lines without settings that may differ, to compare the ranks' settings.
  std::string to_canonical() const;

 private:
  struct OwnSections;
  void read_section(const std::string& name,
                    const std::function<void(FieldVisitor&)>& describe) const;
  void fill_in(const Settings& settings);

  std::shared_ptr<OwnSections> own_;  ///< shared by copies: a section read in one is read in all
};

}  // namespace ddp
