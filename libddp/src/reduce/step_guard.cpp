// SPDX-License-Identifier: Apache-2.0
#include "reduce/step_guard.hpp"

#include <mutex>
#include <utility>
#include <vector>

namespace ddp::detail {

// One for each thread, because another thread's model may be in a backward.
struct StepGuard::Registry {
  std::mutex mutex;
  std::vector<const StepGuard*> guards;
};

std::shared_ptr<StepGuard::Registry> StepGuard::registry_of_thread() {
  thread_local const auto registry = std::make_shared<Registry>();
  return registry;
}

StepGuard::StepGuard(Check check) : check_(std::move(check)), registry_(registry_of_thread()) {
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
  for (const StepGuard* guard : registry->guards) {
    guard->check_(updated);
  }
}

}  // namespace ddp::detail
