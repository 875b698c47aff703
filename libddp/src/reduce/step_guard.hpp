// SPDX-License-Identifier: Apache-2.0
// Finds gradients that no backward averaged, before an optimizer or a checkpoint uses them.
#pragma once

#include <memory>

#include "reduce/backward_pass.hpp"

namespace ddp::detail {

/// Of one model. Registers itself with the thread that makes it, whose optimizers ask it.
class StepGuard {
 public:
  StepGuard(ReducerParts& parts, BackwardPass& pass);
  ~StepGuard();
  StepGuard(const StepGuard&) = delete;
  StepGuard& operator=(const StepGuard&) = delete;

  /// Call before a step that updates these parameters. For each model of this thread with one of
  /// them: throws MismatchError after an incomplete backward and SettingsError while counts of
  /// weighted_backward wait. Among several ranks, warns once where gradients of backward() under
  /// no_sync() wait.
  static void check_all(const NamedParameters& updated);
  /// Throws MismatchError naming the parameters that the previous backward left without a gradient.
  void check_complete() const;
  /// Drops counts that wait if every .grad is undefined: zero_grad() dropped the gradients that
  /// they belong to.
  void drop_stale_counts();

 private:
  struct Registry;
  static std::shared_ptr<Registry> registry_of_thread();
  void check(const NamedParameters& updated);

  ReducerParts& parts_;
  BackwardPass& pass_;
  bool has_warned_ = false;
  std::shared_ptr<Registry> registry_;
};

}  // namespace ddp::detail
