// SPDX-License-Identifier: Apache-2.0
#include "core/log/step_waits.hpp"

#include <mutex>
#include <utility>

namespace ddp::detail {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<const StepWait*> waits;
  uint64_t next_id = 1;  // 0 is for callers with a source of their own
};

// Never destroyed: static models may outlive every other static object.
Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

uint64_t take_id() {
  const std::lock_guard lock(registry().mutex);
  return registry().next_id++;
}

}  // namespace

StepWait::StepWait(WaitKind kind, std::function<double()> milliseconds)
    : kind_(kind),
      milliseconds_(std::move(milliseconds)),
      thread_(std::this_thread::get_id()),
      id_(take_id()) {
  const std::lock_guard lock(registry().mutex);
  registry().waits.push_back(this);
}

StepWait::~StepWait() {
  const std::lock_guard lock(registry().mutex);
  std::erase(registry().waits, this);
}

std::vector<StepWait::Reading> StepWait::read_all(WaitKind kind) {
  const std::lock_guard lock(registry().mutex);
  std::vector<Reading> readings;
  for (const StepWait* wait : registry().waits) {
    if (wait->kind_ == kind && wait->thread_ == std::this_thread::get_id()) {
      readings.push_back({wait->id_, wait->milliseconds_()});
    }
  }
  return readings;
}

}  // namespace ddp::detail
