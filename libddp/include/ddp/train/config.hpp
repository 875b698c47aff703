// SPDX-License-Identifier: Apache-2.0
// All settings of a run: one YAML file, then key=value overrides.
//
//   train --config run.yaml train.batch_size=128 amp.dtype=bf16
//
// Every part also works without it: the members are plain structs with defaults.
#pragma once

#include <memory>
#include <string>
#include <utility>
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

  /// The defaults.
  Config();

  /// Reads all sections above and checks every key and value. Throws SettingsError.
  ///
  /// If `own_sections` announces the program's sections, any other key is refused here. A program's
  /// section with the name of a section above lists which of its keys exist and their defaults (no
  /// keys: no such section). Without `own_sections`, keys of sections that the program may read
  /// later stay unread, unless they look misspelled.
  ///
  /// Some fields of section train act only in the program's loop: grad_accum_steps, max_grad_norm,
  /// non_finite, label_smoothing, mixup, cuda_graph and eval_…. They exist only if uses() names
  /// them or the program announces section train; otherwise they are refused and not shown.
  ///
  /// Unset settings are derived from others: loader.batch_size from train.batch_size (and back);
  /// lr_schedule.total_steps from train.max_steps (with train.epochs the program sets it, from
  /// TrainOptions::num_steps); train.max_steps=0 if only train.epochs is set; and the settings
  /// texts of checkpoints and metrics.
  static Config from_settings(Settings settings, const std::vector<Section>& own_sections = {});
  /// The same for "[--config FILE] [key=value ...]". Ignores --help.
  static Config from_command_line(int argc, const char* const* argv,
                                  const std::vector<Section>& own_sections = {});

  /// The program's own settings: defaults of `T`, overridden by keys under "<name>.". Throws
  /// SettingsError for wrong values and unknown keys of this section. `T` needs describe_fields(T&,
  /// FieldVisitor&) in its namespace. Call it before training begins.
  template <typename T>
  T section(const std::string& name) const {
    T options{};
    read_section(name, [&](FieldVisitor& visitor) { describe_fields(options, visitor); });
    return options;
  }

  /// Refuses keys that neither the library nor the program read. Call it after the last section().
  /// ddp::run calls it when the first step has begun, at the latest.
  void require_all_read() const;
  /// Like require_all_read(), and also refuses settings without effect, naming the fix. A setting
  /// has no effect if no object of the library took its section's options (this Config's or
  /// modified copies), unless uses() names it or the program announced the section. A file may set
  /// such a key to its default or derived value, as to_yaml() does; an override may not. Always
  /// used: context, train.max_steps, train.epochs, and the fields of section train that ddp::run
  /// sets. train.batch_size counts as loader.batch_size. ddp::run calls it after the first step and
  /// at the end.
  void require_all_used() const;

  /// Current values of all keys, including own sections read so far.
  SettingRows rows() const;
  static SettingRows default_rows(const std::vector<Section>& own_sections = {});
  /// A file for --config that reproduces the run.
  std::string to_yaml() const;
  /// For the start of a log; a star marks values other than the default.
  std::string to_table() const;
  /// For comparing ranks; see settings_canonical.
  std::string to_canonical() const;

 private:
  struct OwnSections;

  void read_section(const std::string& name,
                    const std::function<void(FieldVisitor&)>& describe) const;
  void fill_in(const Settings& settings);

  std::shared_ptr<OwnSections> own_;  ///< shared by copies: a section read in one is read in all
};

}  // namespace ddp
