// SPDX-License-Identifier: Apache-2.0
#include "core/launch/place_in_loop.hpp"

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

using Clock = std::chrono::steady_clock;

// Shorter waits are usual, and would only add messages between ranks.
constexpr std::chrono::seconds kLongWait{1};

std::atomic<const char*> recorded_phase{nullptr};

struct Wait {
  int64_t batch, epoch;
  Clock::time_point since;
};
struct Waits {
  std::mutex mutex;
  std::map<uint64_t, Wait> live;  // the oldest first: loaders of several threads may wait
  uint64_t next = 0;
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
  number_ = all.next++;
  all.live[number_] = {batch, epoch, Clock::now()};
}

BatchWait::~BatchWait() {
  auto& all = waits();
  const std::lock_guard lock(all.mutex);
  all.live.erase(number_);
}

std::string long_batch_wait() {
  auto& all = waits();
  const std::lock_guard lock(all.mutex);
  if (all.live.empty()) {
    return {};
  }
  const auto& [batch, epoch, since] = all.live.begin()->second;
  return Clock::now() - since < kLongWait
             ? std::string()
             : concat(kLoaderWait, "batch ", batch, " of epoch ", epoch);
}

std::string last_phase() {
  const char* phase = recorded_phase.load(std::memory_order_relaxed);
  return phase == nullptr ? "" : phase;
}

}  // namespace ddp::detail
