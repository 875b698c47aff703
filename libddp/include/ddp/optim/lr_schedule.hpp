// SPDX-License-Identifier: Apache-2.0
// Learning rates as pure functions of the step: a resume needs no saved state.
#pragma once

#include <cstdint>
#include <vector>

#include "ddp/core/fields.hpp"
#include "ddp/detail/usage_mark.hpp"

namespace ddp {

enum class LrScheduleType {
  Constant,   ///< lr
  Step,       ///< lr * gamma^(step / step_size); torch.optim.lr_scheduler.StepLR
  MultiStep,  ///< lr * gamma^(number of milestones <= step); MultiStepLR
  Cosine,     ///< from lr to min_lr along half a cosine; CosineAnnealingLR
  Linear,     ///< from lr to min_lr linearly; LinearLR
  OneCycle    ///< lr is the maximum; OneCycleLR with its defaults
};

/// Lengths count optimizer steps. Warm-up is linear from lr * warmup_start_factor at step 0 to lr
/// at step warmup_steps (LinearLR). The schedule then runs as if it started there (SequentialLR).
/// Milestones count from step 0, warm-up included. OneCycle has its own warm-up and accepts none.
struct LrScheduleOptions {
  LrScheduleType type = LrScheduleType::Constant;
  double lr = 0.1;          ///< base learning rate
  int64_t total_steps = 0;  ///< Cosine, Linear, OneCycle: length with warm-up; 0: length of the run
  int64_t warmup_steps = 0;           ///< 0: none
  double warmup_start_factor = 0.01;  ///< first step's share of lr
  double min_lr = 0.0;                ///< Cosine, Linear: value at total_steps and after
  double gamma = 0.1;                 ///< Step, MultiStep
  int64_t step_size = 0;              ///< Step: steps between decays, from the end of warm-up
  std::vector<int64_t> milestones{};  ///< MultiStep: steps from 0, warm-up included; ascending
  double pct_start = 0.3;             ///< OneCycle: rising share of the cycle
  double div_factor = 25.0;           ///< OneCycle: starts at lr / div_factor
  double final_div_factor = 1e4;      ///< OneCycle: ends at lr / div_factor / final_div_factor
  bool linear_anneal = false;         ///< OneCycle: lines instead of cosines
  bool three_phase = false;   ///< OneCycle: falls to the start's value before the last phase
  detail::UsageMark usage{};  ///< not a setting: set when a library object receives these options
};
void describe_fields(LrScheduleOptions& options, FieldVisitor& visitor);

class LrSchedule {
 public:
  /// `num_steps` is the length of the run (TrainOptions::num_steps), used if options.total_steps is
  /// 0. Throws SettingsError naming the setting that is out of range or missing.
  explicit LrSchedule(LrScheduleOptions options, int64_t num_steps = 0);

  /// The learning rate of optimizer step `step` (the first is 0). Past the end: the last value.
  double at(int64_t step) const;
  const LrScheduleOptions& options() const { return options_; }  ///< as resolved by the constructor

 private:
  LrScheduleOptions options_;
};

}  // namespace ddp
