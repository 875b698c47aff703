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
  /// `sections` declares the program's sections and uses(). A program's section may have the name
  /// of a library section. It then sets the defaults of the keys that it describes, in the member
  /// of this class. The library's other keys of that section become unknown. grad_accum_steps,
  /// max_grad_norm, non_finite, label_smoothing, mixup, cutmix, cuda_graph, replay_check_every and
  /// eval_… of section train are refused unless uses() names them or the program declares section
  /// train.
  ///
  /// Fills in unset settings: loader.batch_size and train.batch_size from each other, and
  /// lr_schedule.total_steps from train.max_steps. If only train.epochs is set, max_steps is 0.
  static Config from_command_line(int argc, const char* const* argv,
                                  const std::vector<Section>& sections = {});

  /// The settings of a section that the program declared: defaults of `T`, which has
  /// describe_fields(T&, FieldVisitor&), overridden by keys under "<name>.". Throws SettingsError
  /// for wrong values and undeclared sections.
  template <typename T>
  T section(const std::string& name) const {
    T options{};
    read_section(name, [&](FieldVisitor& visitor) { detail::describe(options, visitor); });
    return options;
  }

  /// Throws SettingsError if a setting has no effect: no libddp object received its section's
  /// options (or a copy), uses() does not name it, and the program does not declare its section.
  /// Default and derived values in a settings file are no error. ddp::run calls this in the first
  /// step, after a wrapped model's forward, or when the second step begins, or at the end.
  void require_all_used() const;
  /// Throws SettingsError if the user set train.max_steps or train.epochs, and the program read
  /// neither the member nor TrainOptions::num_steps(). ddp::run calls this in the second step, or
  /// at the end: a loop may read its length after its first step.
  void require_length_used() const;

  /// YAML for --config that reproduces the run, with the program's sections.
  std::string to_yaml() const;
  std::string to_table() const;  ///< all settings; a star marks values other than the default
  std::string to_changed_table() const;  ///< only settings that the user changed

  // For libddp's own parts and tools (src/core/settings.hpp).
  static Config from_settings(Settings settings, const std::vector<Section>& sections = {});
  static std::vector<SettingRow> default_rows(const std::vector<Section>& sections = {});
  std::vector<SettingRow> rows() const;
  /// Sorted key=value lines to compare ranks, without settings that may differ (folders).
  std::string to_canonical() const;

 private:
  struct State;
  void read_section(const std::string& name,
                    const std::function<void(FieldVisitor&)>& describe) const;
  void derive();

  std::shared_ptr<State> state_;  ///< shared by copies
};

/// For ddp::run: `sections`, and of libddp's sections only `names` and context. --help does not
/// list the others, and their settings are unknown. Throws SettingsError for an unknown name.
///
///   return ddp::run(argc, argv, train, ddp::only_sections({"ddp", "optimizer", "train"}));
std::vector<Section> only_sections(const std::vector<std::string>& names,
                                   std::vector<Section> sections = {});

}  // namespace ddp
