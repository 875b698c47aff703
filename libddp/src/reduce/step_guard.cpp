// SPDX-License-Identifier: Apache-2.0
#include "reduce/step_guard.hpp"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "reduce/model/replica_check.hpp"

namespace ddp::detail {
namespace {

std::unordered_set<const void*> tensors_of(const NamedParameters& parameters) {
  std::unordered_set<const void*> tensors;
  for (const auto& entry : parameters) {
    tensors.insert(entry.tensor.unsafeGetTensorImpl());
  }
  return tensors;
}

}  // namespace

// One for each thread, because another thread's model may be in a backward.
struct StepGuard::Registry {
  std::mutex mutex;
  std::vector<StepGuard*> guards;
};

std::shared_ptr<StepGuard::Registry> StepGuard::registry_of_thread() {
  thread_local const auto registry = std::make_shared<Registry>();
  return registry;
}

StepGuard::StepGuard(ReducerParts& parts, BackwardPass& pass)
    : parts_(parts),
      pass_(pass),
      own_(tensors_of(parts.gradients.parameters())),
      registry_(registry_of_thread()) {
  const std::lock_guard lock(registry_->mutex);
  registry_->guards.push_back(this);
}

StepGuard::~StepGuard() {
  const std::lock_guard lock(registry_->mutex);
  std::erase(registry_->guards, this);
}

bool StepGuard::owns_any(const NamedParameters& parameters) const {
  return std::any_of(parameters.begin(), parameters.end(), [this](const auto& entry) {
    return own_.contains(entry.tensor.unsafeGetTensorImpl());
  });
}

bool StepGuard::holds_gradients() const {
  const auto& parameters = parts_.gradients.parameters();
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const auto& entry) { return entry.tensor.grad().defined(); });
}

void StepGuard::ask_owners(const NamedParameters& parameters,
                           const std::function<void(StepGuard&)>& check) {
  if (torch::autograd::get_current_graph_task_id() != -1) {
    return;  // a comm hook that steps: the pass is locked
  }
  const auto registry = registry_of_thread();
  const std::lock_guard lock(registry->mutex);
  for (StepGuard* guard : registry->guards) {
    if (guard->owns_any(parameters)) {
      check(*guard);
    }
  }
}

std::vector<std::shared_ptr<ReplicaCheck>> StepGuard::check_all(const NamedParameters& updated) {
  std::vector<std::shared_ptr<ReplicaCheck>> replicas;
  ask_owners(updated, [&](StepGuard& guard) {
    auto& parts = guard.parts_;
    if (parts.reductions.are_rehearsed()) {
      throw RehearsalEnd();
    }
    guard.check_used();
    guard.check_waiting();
    // The collectives of a backward that threw come before any others.
    if (parts.replicas != nullptr && !ReplicaCheck::is_held() && !parts.mean.in_join() &&
        !guard.pass_.threw()) {
      replicas.push_back(parts.replicas);
    }
  });
  return replicas;
}

void StepGuard::check_ended(const NamedParameters& measured) {
  ask_owners(measured, [](StepGuard& guard) { guard.check_used(); });
}

void StepGuard::check_complete() const {
  if (const auto why = pass_.why_incomplete(); !why.empty()) {
    throw MismatchError(why);
  }
}

void StepGuard::check_used() const {
  const bool threw = pass_.threw();
  const auto why = threw ? concat("a backward", parts_.of_model(),
                                  " ended with an exception, and .grad is not averaged; fix: drop "
                                  "it with zero_grad()")
                         : pass_.why_incomplete();
  if (!why.empty() && holds_gradients()) {
    throw MismatchError(why);
  }
}

void StepGuard::drop_stale_counts() {
  // Reducer::join_broken_backward() completes a broken backward and needs the counts.
  if (!parts_.mean.counts().is_none() && !pass_.threw() && !holds_gradients()) {
    parts_.mean.reset();
  }
}

void StepGuard::check_waiting() {
  drop_stale_counts();
  const auto& counts = parts_.mean.counts();
  if (counts.is_none() || pass_.threw()) {
    return;
  }
  if (counts.is_weighted) {
    throw SettingsError(concat(
        "gradients", parts_.of_model(), " of weighted_backward under no_sync() are this rank's ",
        "sums, because no synchronised backward followed; fix: run the last backward of each step "
        "outside no_sync(), or drop the gradients with zero_grad()"));
  }
  if (parts_.communicator->world_size() > 1 && !std::exchange(has_warned_, true)) {
    log_warning(concat(
        "gradients", parts_.of_model(), " are not averaged, because no synchronised backward ",
        "followed: the replicas diverge, unless the program averaged them itself; fix: run the "
        "last backward of each step outside no_sync()"));
  }
}

}  // namespace ddp::detail
