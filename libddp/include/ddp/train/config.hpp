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

#include "ddp/amp/amp_options.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/core/setting_row.hpp"
#include "ddp/core/settings.hpp"
#include "ddp/data/options.hpp"
#include "ddp/optim/lr_schedule.hpp"
#include "ddp/optim/optimizer_options.hpp"
#include "ddp/reduce/ddp_options.hpp"
#include "ddp/train/checkpoint_options.hpp"
#include "ddp/train/metrics_options.hpp"
#include "ddp/train/train_options.hpp"

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

  /// Reads all sections above and checks every key and value. Where `own_sections` announces the
  /// program's sections, any other key is refused here; one named as a section above says which of
  /// its keys there are and what their defaults (without keys: no such section). Without any, keys
  /// of sections that the program may ask for later stay unread, unless they look misspelled.
  /// Those fields of section train on which a loop alone can act (grad_accum_steps, max_grad_norm,
  /// non_finite, label_smoothing, mixup, cuda_graph and eval_…) are there only where uses() names
  /// them, or where the program announces section train: elsewhere they are refused and not shown.
  /// Settings that follow from others are filled in where they were left open: loader.batch_size
  /// from train.batch_size (and back), lr_schedule.total_steps from train.max_steps
  /// (not where train.epochs is set: then the program sets it, from TrainOptions::num_steps),
  /// train.max_steps=0 where only train.epochs is set, and what checkpoints and metrics show of the
  /// settings. Throws SettingsError.
  static Config from_settings(Settings settings, const std::vector<Section>& own_sections = {});
  /// The same for "[--config FILE] [key=value ...]"; --help is not acted on here.
  static Config from_command_line(int argc, const char* const* argv,
                                  const std::vector<Section>& own_sections = {});

  /// The program's own settings: defaults of `T`, changed by what was set under "<name>.". Throws
  /// SettingsError for wrong values and for unknown keys of this section. `T` has
  /// describe_fields(T&, FieldVisitor&) in its namespace. Call it before training begins.
  template <typename T>
  T section(const std::string& name) const {
    T options{};
    read_section(name, [&](FieldVisitor& visitor) { describe_fields(options, visitor); });
    return options;
  }

  /// Refuses keys that neither the library nor the program read: call it when all sections were
  /// asked for. ddp::run does, at the latest when the first step has begun.
  void require_all_read() const;
  /// The same, and refuses settings that change nothing, with the fix: those of a section above
  /// whose options no object of the library took (this Config's, or copies of them, with what the
  /// program changed), unless uses() names them or the program announced the section. A file may
  /// say what would hold without it, as to_yaml() does; an override may not. Always used:
  /// context, train.max_steps, train.epochs, and what ddp::run sets from section train;
  /// train.batch_size is loader.batch_size. ddp::run calls it after the first step and at the end.
  void require_all_used() const;

  /// Present values of all keys, own sections included as far as they were read.
  SettingRows rows() const;
  static SettingRows default_rows(const std::vector<Section>& own_sections = {});
  /// A file for --config that gives the same run.
  std::string to_yaml() const;
  /// For the start of a log; a star marks what is not the default.
  std::string to_table() const;
  /// For comparing ranks; see settings_canonical.
  std::string to_canonical() const;

 private:
  struct OwnSections;

  void read_section(const std::string& name,
                    const std::function<void(FieldVisitor&)>& describe) const;
  void fill_in(const Settings& settings);

  std::shared_ptr<OwnSections> own_;  ///< shared by copies: a section read from one is read
};

}  // namespace ddp
