// SPDX-License-Identifier: Apache-2.0
#include "reduce/step_guard.hpp"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

bool share_a_tensor(const NamedParameters& own, const NamedParameters& updated) {
  return std::any_of(own.begin(), own.end(), [&](const auto& a) {
    return std::any_of(updated.begin(), updated.end(),
                       [&](const auto& b) { return a.tensor.is_same(b.tensor); });
  });
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
    : parts_(parts), pass_(pass), registry_(registry_of_thread()) {
  const std::lock_guard lock(registry_->mutex);
  registry_->guards.push_back(this);
}

StepGuard::~StepGuard() {
  const std::lock_guard lock(registry_->mutex);
  std::erase(registry_->guards, this);
}

void StepGuard::check_all(const NamedParameters& updated) {
  const auto registry = registry_of_thread();
  const std::lock_guard lock(registry->mutex);
  for (StepGuard* guard : registry->guards) {
    guard->check(updated);
  }
}

void StepGuard::check_complete() const {
  if (const auto why = pass_.why_incomplete(); !why.empty()) {
    throw MismatchError(why);
  }
}

void StepGuard::drop_stale_counts() {
  // Reducer::join_broken_backward() completes a broken backward and needs the counts.
  if (parts_.mean.counts().is_none() || pass_.threw()) {
    return;
  }
  const auto& parameters = parts_.gradients.parameters();
  if (std::none_of(parameters.begin(), parameters.end(),
                   [](const auto& entry) { return entry.tensor.grad().defined(); })) {
    parts_.mean.reset();
  }
}

void StepGuard::check(const NamedParameters& updated) {
  drop_stale_counts();
  const auto why = pass_.why_incomplete();
  const auto& counts = parts_.mean.counts();
  const bool waits = !counts.is_none() && !pass_.threw();
  if ((why.empty() && !waits) || !share_a_tensor(parts_.gradients.parameters(), updated)) {
    return;
  }
  if (!why.empty()) {
    throw MismatchError(why);
  }
  if (counts.is_weighted) {
    throw SettingsError(concat(
        "gradients", parts_.of_model(), " of weighted_backward under no_sync() are this ",
        "rank's sums, because no synchronised backward followed; fix: run the last backward of "
        "each step outside no_sync(), or drop the gradients with zero_grad()"));
  }
  if (parts_.communicator->world_size() > 1 && !std::exchange(has_warned_, true)) {
    log_warning(
        concat("gradients", parts_.of_model(), " of a backward under no_sync() are not averaged, ",
               "because no synchronised backward followed: the replicas diverge; fix: run the last "
               "backward of each step outside no_sync()"));
  }
}

}  // namespace ddp::detail
