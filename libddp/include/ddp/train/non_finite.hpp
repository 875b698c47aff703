// SPDX-License-Identifier: Apache-2.0
// Handling of inf and NaN in a training loop's losses and gradients (train.non_finite).
//
//   ddp::NonFiniteGuard guard(ctx, cfg.train.non_finite, *optimizer, scaler);
//   checkpointer.set_before_save([&] { return guard.before_save(); });
//   // in the lambda of a GraphedStep, which returns {loss, found.first_non_finite}:
//   scaler.scale(guard.watch(loss)).backward();
//   auto found = scaler.clip_and_step(*optimizer, scalars, max_norm, guard.skips());
//   scaler.update();
//   // in the loop, before checkpointer.save_if_due(i):
//   auto result = step(…);
//   guard.end_step(i, {.loss = result.log[0], .first_non_finite = result.log[1]});
//   // after the loop:
//   guard.check_weights();
//
// Loops without a GraphedStep use GradScaler::clip_and_step and Optimizer::non_finite_report().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "ddp/amp/amp.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/core/error.hpp"
#include "ddp/optim/optimizer.hpp"
#include "ddp/train/options.hpp"
#include "ddp/train/step_log.hpp"

namespace ddp {

/// Training has diverged (exit code 70): a restart would end the same way.
struct NonFiniteError : Error {
  explicit NonFiniteError(const std::string& message) : Error(ExitCode::Mismatch, message) {}
};

/// The first of `parameters` with inf or NaN; empty if there is none. The host waits.
std::string first_non_finite(const NamedParameters& parameters);

/// Checks the loss that each step logged, and the first parameter with a non-finite gradient.
/// docs/semantics_training.md, "Losses and gradients that are not finite", says what each action
/// does. Error throws NonFiniteError naming step, parameter and rank, on GPUs up to 32 steps late,
/// because the host does not wait for the device.
///
/// With an enabled GradScaler, inf in gradients is normal, so only the loss is checked. All ranks
/// call all methods but watch() in the same order. The constructor's arguments outlive the guard.
class NonFiniteGuard {
 public:
  /// What a step logged. The gradients of a step without `first_non_finite` are not checked.
  struct Logged {
    LoggedScalar loss = {};              ///< as watch() got it, unscaled
    LoggedScalar first_non_finite = {};  ///< GradientScan::first_non_finite
  };

  /// `action` is train.non_finite.
  NonFiniteGuard(const Context& context, NonFinite action, const Optimizer& optimizer,
                 const GradScaler& scaler);
  ~NonFiniteGuard();

  bool skips() const;  ///< for GradScaler::clip_and_step
  /// Returns the tensor to call backward() on. With NonFinite::Skip, a non-finite `loss` gives NaN
  /// gradients, which the all-reduce spreads to all ranks. With other actions returns `loss`.
  at::Tensor watch(const at::Tensor& loss) const;

  void end_step(int64_t step, const Logged& logged);  ///< call after each step
  /// Checks all steps so far; the host waits for the last one. For logging steps.
  void check_steps();
  /// For Checkpointer::set_before_save. Checks all steps so far, and returns a reason if at least
  /// the last two updates were skipped, else an empty text.
  std::string before_save();
  /// Call at the end of training. With NonFinite::Error, throws if a weight is not finite.
  void check_weights() const;

 private:
  class Checks;
  std::unique_ptr<Checks> checks_;
};

}  // namespace ddp
