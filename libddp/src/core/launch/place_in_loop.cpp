// SPDX-License-Identifier: Apache-2.0
#include "core/launch/place_in_loop.hpp"

#include <atomic>
#include <chrono>
#include <mutex>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

using Clock = std::chrono::steady_clock;

// Shorter waits are usual, and would only add messages between ranks.
constexpr std::chrono::seconds kLongWait{1};

std::atomic<const char*> recorded_phase{nullptr};

struct Waits {
  std::mutex mutex;
  int number = 0;  // loaders of several threads may wait
  int64_t batch = 0, epoch = 0;
  Clock::time_point since{};
};

Waits& waits() {
  static auto* instance = new Waits;  // leaked: loader threads may outlive static objects
  return *instance;
}

}  // namespace

void record_phase(const char* phase) {
  recorded_phase.store(phase, std::memory_order_relaxed);
}

BatchWait::BatchWait(int64_t batch, int64_t epoch) {
  auto& all = waits();
  const std::lock_guard lock(all.mutex);
  ++all.number;
  all.batch = batch;
  all.epoch = epoch;
  all.since = Clock::now();
}

BatchWait::~BatchWait() {
  auto& all = waits();
  const std::lock_guard lock(all.mutex);
  --all.number;
}

std::string long_batch_wait() {
  auto& all = waits();
  const std::lock_guard lock(all.mutex);
  if (all.number > 0 && Clock::now() - all.since >= kLongWait) {
    return concat("loader, waiting for batch ", all.batch, " of epoch ", all.epoch);
  }
  return {};
}

std::string last_phase() {
  const char* phase = recorded_phase.load(std::memory_order_relaxed);
  return phase == nullptr ? "" : phase;
}

}  // namespace ddp::detail
