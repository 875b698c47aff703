// SPDX-License-Identifier: Apache-2.0
// Finds gradients that no backward averaged, before an optimizer or a checkpoint uses them.
#pragma once

#include <functional>
#include <memory>
#include <unordered_set>
#include <vector>

#include "reduce/backward_pass.hpp"

namespace ddp::detail {

/// Of one model. Registers itself with the thread that makes it, whose optimizers ask it.
class StepGuard {
 public:
  StepGuard(ReducerParts& parts, BackwardPass& pass);
  ~StepGuard();
  StepGuard(const StepGuard&) = delete;
  StepGuard& operator=(const StepGuard&) = delete;

  /// Call before a step that updates these parameters. Ends a rehearsal (GradientProbe). Asks the
  /// models of this thread that own one of them. Throws MismatchError if .grad is of a backward
  /// that did not end, and SettingsError while counts of weighted_backward wait. Among several
  /// ranks, warns once where gradients of backward() under no_sync() wait. Does nothing inside a
  /// backward.
  /// Returns the checks of these models' replicas, without models in a join, where ranks make other
  /// numbers of steps, and without models whose last backward threw. Empty inside a backward and
  /// while a ReplicaCheck::Hold lives.
  static std::vector<std::shared_ptr<ReplicaCheck>> check_all(const NamedParameters& updated);
  /// The same without what waits under no_sync(): call it before the gradients are measured.
  static void check_ended(const NamedParameters& measured);
  bool owns_any(const NamedParameters& parameters) const;
  /// Of this model; nullptr: off.
  std::shared_ptr<ReplicaCheck>& replicas() const { return parts_.replicas; }
  /// Throws MismatchError naming the parameters that the previous backward left without a gradient.
  void check_complete() const;
  /// The same, unless zero_grad() dropped the gradients of that backward.
  void check_used() const;
  /// Drops counts that wait if every .grad is undefined: zero_grad() dropped the gradients that
  /// they belong to.
  void drop_stale_counts();

 private:
  struct Registry;
  static std::shared_ptr<Registry> registry_of_thread();
  static void ask_owners(const NamedParameters& parameters,
                         const std::function<void(StepGuard&)>& check);
  bool holds_gradients() const;
  void check_waiting();

  ReducerParts& parts_;
  BackwardPass& pass_;
  const std::unordered_set<const void*> own_;  // the model's parameters
  bool has_warned_ = false;
  std::shared_ptr<Registry> registry_;
};

}  // namespace ddp::detail
