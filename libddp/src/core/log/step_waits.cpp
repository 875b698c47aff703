// SPDX-License-Identifier: Apache-2.0
#include "core/log/step_waits.hpp"

#include <atomic>
#include <mutex>
#include <utility>

namespace ddp::detail {
namespace {

std::atomic<uint64_t> next_id = 0;

}  // namespace

// One for each thread, because a reading may wait for the thread's device.
struct StepWait::Registry {
  std::mutex mutex;
  std::vector<const StepWait*> waits;
  double ended_ms = 0;  // of loaders that were destroyed
};

std::shared_ptr<StepWait::Registry> StepWait::registry_of_thread() {
  thread_local const auto registry = std::make_shared<Registry>();
  return registry;
}

StepWait::StepWait(WaitKind kind, std::function<double()> milliseconds, NumPasses num_passes)
    : kind_(kind),
      milliseconds_(std::move(milliseconds)),
      num_passes_(std::move(num_passes)),
      registry_(registry_of_thread()),
      id_(next_id++) {
  const std::lock_guard lock(registry_->mutex);
  registry_->waits.push_back(this);
}

StepWait::~StepWait() {
  double last_ms = 0;
  try {
    last_ms = kind_ == WaitKind::Batches ? milliseconds_() : 0;
  } catch (...) {  // the device failed, and the run with it
  }
  const std::lock_guard lock(registry_->mutex);
  std::erase(registry_->waits, this);
  registry_->ended_ms += last_ms;
}

std::vector<StepWait::Reading> StepWait::read_all(WaitKind kind) {
  const auto registry = registry_of_thread();
  const std::lock_guard lock(registry->mutex);
  std::vector<Reading> readings;
  for (const StepWait* wait : registry->waits) {
    if (wait->kind_ == kind) {
      readings.push_back({.id = wait->id_,
                          .milliseconds = wait->milliseconds_(),
                          .num_passes = wait->num_passes_ ? wait->num_passes_() : std::nullopt});
    }
  }
  return readings;
}

StepWait::Total StepWait::total_of_batches() {
  const auto registry = registry_of_thread();
  const std::lock_guard lock(registry->mutex);
  Total total{.milliseconds = registry->ended_ms};
  for (const StepWait* wait : registry->waits) {
    if (wait->kind_ == WaitKind::Batches) {
      total.milliseconds += wait->milliseconds_();
      total.has_loader = true;
    }
  }
  return total;
}

}  // namespace ddp::detail
