// SPDX-License-Identifier: Apache-2.0
// Detects collectives that do not end, from counters alone. Free of LibTorch and CUDA.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "core/running_clock.hpp"

namespace ddp::detail {

/// A series of collectives that end in order: the eager ones, or those of one captured graph.
/// `enqueued` is read after `completed`, so it is never smaller.
struct LaneProgress {
  uint64_t enqueued = 0;
  uint64_t completed = 0;
};

struct Stall {
  size_t lane = 0;
  LaneProgress progress;
  std::chrono::milliseconds stood{0};  ///< time without any counter change
};

/// Depends only on its arguments and earlier calls. All lanes share one device queue, so any
/// counter that moves is progress of all.
class StallDetector {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  /// A gap between looks counts as at most `longest_turn`: a longer one means that this process was
  /// suspended.
  explicit StallDetector(std::chrono::milliseconds longest_turn = std::chrono::hours(1000))
      : longest_turn_(longest_turn) {}

  std::optional<Stall> look(const std::vector<LaneProgress>& lanes, TimePoint steady,
                            std::chrono::milliseconds limit) {
    if (!clock_) {
      clock_.emplace(longest_turn_, steady);
    }
    clock_->tick(steady);
    const auto now = clock_->at(steady);
    // From the back: a graph's lane is pending once the device reached it. The eager lane is
    // pending once the host enqueued, maybe behind that graph.
    const auto pending = std::find_if(lanes.rbegin(), lanes.rend(), [](const LaneProgress& lane) {
      return lane.enqueued != lane.completed;
    });
    uint64_t completed = 0;
    for (const auto& lane : lanes) {
      completed += lane.completed;
    }
    const bool moved = !last_completed_ || completed != *last_completed_;
    last_completed_ = completed;
    if (moved || pending == lanes.rend() || !was_pending_) {
      // Starts at the first look at a pending collective, not at the end of the last one.
      since_ = now;
    }
    was_pending_ = pending != lanes.rend();
    const auto stood = std::chrono::duration_cast<std::chrono::milliseconds>(now - since_);
    if (!was_pending_ || stood < limit) {
      return std::nullopt;
    }
    return Stall{static_cast<size_t>(lanes.rend() - pending - 1), *pending, stood};
  }

 private:
  const std::chrono::milliseconds longest_turn_;
  std::optional<RunningClock> clock_;
  std::optional<uint64_t> last_completed_;
  bool was_pending_ = false;
  TimePoint since_{};
};

/// Calls `probe()` in a thread every `interval` until it returns false. The probe may destroy the
/// Watchdog.
template <typename Probe>
class Watchdog {
 public:
  Watchdog(Probe probe, std::chrono::milliseconds interval)
      : core_(std::make_shared<Core>(std::move(probe), interval)),
        thread_([core = core_] { core->run(); }) {}
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog() { stop(); }

  /// No look begins afterwards. Waits for a running look unless called from it.
  void stop() {
    if (!thread_.joinable()) {
      return;
    }
    {
      const std::lock_guard lock(core_->mutex);
      core_->stopping = true;
    }
    core_->changed.notify_all();
    if (std::this_thread::get_id() == thread_.get_id()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }

 private:
  struct Core {
    Core(Probe p, std::chrono::milliseconds i) : probe(std::move(p)), interval(i) {}

    void run() {
      std::unique_lock lock(mutex);
      while (!changed.wait_for(lock, interval, [this] { return stopping; })) {
        lock.unlock();
        const bool go_on = probe();
        lock.lock();
        if (!go_on) {
          return;
        }
      }
    }

    Probe probe;
    const std::chrono::milliseconds interval;
    std::mutex mutex;
    std::condition_variable changed;
    bool stopping = false;
  };

  const std::shared_ptr<Core> core_;
  std::thread thread_;
};

}  // namespace ddp::detail
