// SPDX-License-Identifier: Apache-2.0
#include "ddp/optim/lr_schedule.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <utility>

namespace ddp {
namespace {

template <typename T>
[[noreturn]] void fail_schedule(const std::string& setting, T value, const std::string& limit) {
  throw SettingsError(concat("lr_schedule.", setting, " is ", value, ": ", limit));
}

void require_positive(const std::string& setting, double value) {
  if (!(value > 0.0)) {
    fail_schedule(setting, value, "must be more than 0");
  }
}

double cosine_between(double start, double end, double share) {
  return end + (start - end) / 2.0 * (std::cos(std::numbers::pi * share) + 1.0);
}

double line_between(double start, double end, double share) {
  return (end - start) * share + start;
}

// torch.optim.lr_scheduler.OneCycleLR.get_lr, with its phases.
double one_cycle(const LrScheduleOptions& o, int64_t step) {
  const double initial = o.lr / o.div_factor;
  const double lowest = initial / o.final_div_factor;
  const double peak = o.pct_start * static_cast<double>(o.total_steps) - 1.0;
  const double last = static_cast<double>(o.total_steps) - 1.0;
  struct Phase {
    double end_step, start_lr, end_lr;
  };
  std::vector<Phase> phases;
  if (o.three_phase) {
    const double fallen = 2.0 * o.pct_start * static_cast<double>(o.total_steps) - 2.0;
    phases = {{peak, initial, o.lr}, {fallen, o.lr, initial}, {last, initial, lowest}};
  } else {
    phases = {{peak, initial, o.lr}, {last, o.lr, lowest}};
  }
  const double now = std::min(static_cast<double>(step), last);
  double start_step = 0.0;
  for (size_t i = 0;; ++i) {
    const Phase& phase = phases[i];
    if (now <= phase.end_step || i + 1 == phases.size()) {
      const double length = phase.end_step - start_step;
      const double share = length == 0.0 ? 1.0 : (now - start_step) / length;  // length 0: one step
      return o.linear_anneal ? line_between(phase.start_lr, phase.end_lr, share)
                             : cosine_between(phase.start_lr, phase.end_lr, share);
    }
    start_step = phase.end_step;
  }
}

void validate_one_cycle(const LrScheduleOptions& o) {
  if (!(o.pct_start >= 0.0 && o.pct_start <= 1.0)) {
    fail_schedule("pct_start", o.pct_start, "must be between 0 and 1");
  }
  require_positive("div_factor", o.div_factor);
  require_positive("final_div_factor", o.final_div_factor);
  if (o.warmup_steps != 0) {
    fail_schedule("warmup_steps", o.warmup_steps, "one_cycle warms up by itself; use pct_start");
  }
}

void validate(const LrScheduleOptions& o) {
  const bool needs_total = o.type == LrScheduleType::Cosine || o.type == LrScheduleType::Linear ||
                           o.type == LrScheduleType::OneCycle;
  if (!(o.lr >= 0.0) || !std::isfinite(o.lr)) {
    fail_schedule("lr", o.lr, "must be 0 or more");
  }
  if (o.warmup_steps < 0) {
    fail_schedule("warmup_steps", o.warmup_steps, "must be 0 or more");
  }
  if (!(o.warmup_start_factor >= 0.0 && o.warmup_start_factor <= 1.0)) {
    fail_schedule("warmup_start_factor", o.warmup_start_factor, "must be between 0 and 1");
  }
  if (needs_total && o.total_steps == 0) {
    fail_schedule(
        "total_steps", 0,
        "this schedule has a length, and the program does not tell it that of the run; fix: set "
        "lr_schedule.total_steps or train.max_steps, or LrSchedule(options, num_steps) in the "
        "program");
  }
  if (needs_total && o.total_steps <= std::max<int64_t>(o.warmup_steps, 0)) {
    fail_schedule("total_steps", o.total_steps,
                  concat("must be more than warmup_steps (", o.warmup_steps, ")"));
  }
  if (o.type == LrScheduleType::Step && o.step_size < 1) {
    fail_schedule("step_size", o.step_size, "must be 1 or more");
  }
  if (!std::is_sorted(o.milestones.begin(), o.milestones.end())) {
    throw SettingsError("lr_schedule.milestones must ascend");
  }
  if (o.type == LrScheduleType::OneCycle) {
    validate_one_cycle(o);
  }
}

double after_warmup(const LrScheduleOptions& o, int64_t step) {
  const int64_t begun = step - o.warmup_steps;
  const double share = std::min(
      1.0, static_cast<double>(begun) / static_cast<double>(o.total_steps - o.warmup_steps));
  switch (o.type) {
    case LrScheduleType::Constant:
      return o.lr;
    case LrScheduleType::Step:
      return o.lr * std::pow(o.gamma, static_cast<double>(begun / o.step_size));
    case LrScheduleType::MultiStep: {
      const auto passed = std::upper_bound(o.milestones.begin(), o.milestones.end(), step);
      return o.lr * std::pow(o.gamma, static_cast<double>(passed - o.milestones.begin()));
    }
    case LrScheduleType::Cosine:
      return cosine_between(o.lr, o.min_lr, share);
    case LrScheduleType::Linear:
      return line_between(o.lr, o.min_lr, share);
    case LrScheduleType::OneCycle:
      return one_cycle(o, step);
  }
  throw InternalError("libddp bug: unknown LrScheduleType");
}

}  // namespace

void describe_fields(LrScheduleOptions& o, FieldVisitor& v) {
  v.field({.name = "type", .doc = "Shape of the schedule."}, o.type,
          {{"constant", LrScheduleType::Constant},
           {"step", LrScheduleType::Step},
           {"multi_step", LrScheduleType::MultiStep},
           {"cosine", LrScheduleType::Cosine},
           {"linear", LrScheduleType::Linear},
           {"one_cycle", LrScheduleType::OneCycle}});
  v.field({.name = "lr",
           .doc = "Base learning rate; one_cycle: the highest.",
           .min = 0.0,
           .common = true},
          o.lr);
  v.field({.name = "total_steps",
           .doc = "cosine, linear, one_cycle: length including warm-up. 0: length of the run.",
           .unit = "steps",
           .min = 0},
          o.total_steps);
  v.field({.name = "warmup_steps", .doc = "Steps of linear warm-up.", .unit = "steps", .min = 0},
          o.warmup_steps);
  v.field({.name = "warmup_start_factor",
           .doc = "Share of lr at the start of warm-up.",
           .min = 0.0,
           .max = 1.0},
          o.warmup_start_factor);
  v.field({.name = "min_lr", .doc = "cosine, linear: learning rate at the end.", .min = 0.0},
          o.min_lr);
  v.field({.name = "gamma", .doc = "step, multi_step: factor of each decay.", .min = 0.0}, o.gamma);
  v.field({.name = "step_size",
           .doc = "step: number of steps between decays, from the end of warm-up.",
           .unit = "steps",
           .min = 0},
          o.step_size);
  v.field({.name = "milestones",
           .doc = "multi_step: steps at which lr decays, from step 0, warm-up included.",
           .unit = "steps"},
          o.milestones);
  v.field({.name = "pct_start",
           .doc = "one_cycle: share of the steps in which lr rises.",
           .min = 0.0,
           .max = 1.0},
          o.pct_start);
  v.field({.name = "div_factor", .doc = "one_cycle: starts at lr / div_factor.", .min = 0.0},
          o.div_factor);
  v.field({.name = "final_div_factor",
           .doc = "one_cycle: ends at lr / div_factor / final_div_factor.",
           .min = 0.0},
          o.final_div_factor);
  v.field({.name = "linear_anneal", .doc = "one_cycle: linear instead of cosine annealing."},
          o.linear_anneal);
  v.field(
      {.name = "three_phase", .doc = "one_cycle: return to the initial lr before the last phase."},
      o.three_phase);
}

LrSchedule::LrSchedule(LrScheduleOptions options, int64_t num_steps)
    : options_(std::move(options)) {
  options_.usage.set();
  if (options_.total_steps == 0) {
    options_.total_steps = num_steps;
  }
  validate(options_);
}

double LrSchedule::at(int64_t step) const {
  const LrScheduleOptions& o = options_;
  step = std::max<int64_t>(step, 0);
  if (step < o.warmup_steps) {
    const double share = static_cast<double>(step) / static_cast<double>(o.warmup_steps);
    return o.lr * (o.warmup_start_factor + (1.0 - o.warmup_start_factor) * share);
  }
  return after_warmup(o, step);
}

}  // namespace ddp
