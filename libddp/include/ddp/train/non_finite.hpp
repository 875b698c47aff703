// SPDX-License-Identifier: Apache-2.0
// What a training loop does about inf and NaN in its losses and gradients (train.non_finite).
//
//   ddp::NonFiniteGuard guard(ctx, cfg.train.non_finite, optimizer, scaler);
//   ddp::GraphedStep step(ctx, …, [&](const ddp::Batch& batch, const ddp::StepScalars& scalars) {
//     …
//     scaler.scale(guard.watch(loss)).backward();
//     auto found = scaler.clip_and_step(optimizer, scalars, max_norm, guard.skips());
//     scaler.update();
//     return std::vector{loss, found.first_non_finite};
//   });
//   checkpointer.set_before_save([&] { return guard.before_save(); });
//   for (…) {
//     auto result = step(loader.next(), {.lr = lr, .step = i});
//     guard.end_step(i, result.log, {.loss = 0, .first_non_finite = 1});
//     checkpointer.save_if_due(i);
//   }
//   guard.check_weights();
//   …
//   return ddp::run(argc, argv, train, {ddp::uses({"train.non_finite"})});
//
// Loops without a GraphedStep call GradScaler::clip_and_step with skip_non_finite, which drops the
// update on the device, and Optimizer::non_finite_report().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <string>

#include "ddp/amp/grad_scaler.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/core/error.hpp"
#include "ddp/optim/optimizer.hpp"
#include "ddp/train/step_log.hpp"
#include "ddp/train/train_options.hpp"

namespace ddp {

/// Training has diverged (exit code 70): starting again would end alike.
struct NonFiniteError : Error {
  explicit NonFiniteError(const std::string& message) : Error(ExitCode::Mismatch, message) {}
};

/// The first of `parameters` that holds inf or NaN; empty: none does. The host waits.
std::string first_non_finite(const NamedParameters& parameters);

/// Looks at each step's loss and at the first parameter whose gradient is not finite, which the
/// step's StepLog brings to the host.
///
///   Error   throws NonFiniteError naming step, parameter and rank. On GPUs it may come 32 steps
///           late: the host does not wait for the device.
///   Skip    the device drops the update on all ranks in that step, by found_inf. What a forward
///           changes in buffers (BatchNorm's running statistics) stays changed.
///   Ignore  does nothing.
///
/// With a GradScaler that is enabled, inf in gradients is ordinary: the scaler skips such a step.
/// Then the loss alone is looked at. All methods but watch() are called by all ranks in the same
/// order. The objects it is given outlive it.
class NonFiniteGuard {
 public:
  /// Which numbers of the StepLog are what; first_non_finite -1: this step did not look.
  struct Places {
    int loss = 0;
    int first_non_finite = -1;
  };

  NonFiniteGuard(const Context& context, NonFinite action, const Optimizer& optimizer,
                 const GradScaler& scaler);

  /// Whether the step drops an update that is not finite: for GradScaler::clip_and_step.
  bool skips() const { return action_ == NonFinite::Skip; }
  /// What backward begins with. For Skip a loss that is not finite makes its gradients NaN, so that
  /// the reduced ones tell all ranks; else `loss` itself.
  at::Tensor watch(const at::Tensor& loss) const;

  /// After each step. Throws what Error says.
  void end_step(int64_t step, const StepLog& log, const Places& places);
  /// Looks at all steps so far: the host waits for the last one. For logging steps.
  void look();
  /// For Checkpointer::set_before_save: look(), and why the state is not to be trusted. This is so
  /// where the last two updates or more were skipped: weights may be finite and useless.
  std::string before_save();
  /// At the end of training, for what the last update did. For Error it throws where a weight is
  /// not finite; the host waits.
  void check_weights() const;

 private:
  struct Step {
    int64_t step;
    StepLog log;
    Places places;
  };
  void look_at_all_but(size_t unseen);
  void look_at(const Step& step);
  [[noreturn]] void refuse(int64_t step, double loss, int64_t parameter) const;

  const Context& context_;
  const NonFinite action_;
  const Optimizer& optimizer_;
  const GradScaler& scaler_;
  std::deque<Step> steps_;    // to be looked at
  int64_t bad_in_a_row_ = 0;  // up to the last one looked at
};

}  // namespace ddp
