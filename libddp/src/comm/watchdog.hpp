// SPDX-License-Identifier: Apache-2.0
// Detects collectives that do not end, from counters alone, and reports them. Free of LibTorch and
// CUDA.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/communicator_state.hpp"
#include "core/control/running_clock.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/core/membership.hpp"

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
  std::chrono::milliseconds duration{0};  ///< time without any counter change
};

/// Depends only on its arguments and earlier calls. All lanes share one device queue, so any
/// counter that moves is progress of all.
class StallDetector {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  /// A gap between checks counts as at most `longest_turn`: in a longer one this process was
  /// suspended.
  explicit StallDetector(std::chrono::milliseconds longest_turn = std::chrono::hours(1000))
      : longest_turn_(longest_turn) {}

  std::optional<Stall> check(const std::vector<LaneProgress>& lanes, TimePoint steady,
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
      // Starts at the first check with a pending collective, not at the end of the last collective.
      since_ = now;
    }
    was_pending_ = pending != lanes.rend();
    const auto duration = std::chrono::duration_cast<std::chrono::milliseconds>(now - since_);
    if (!was_pending_ || duration < limit) {
      return std::nullopt;
    }
    return Stall{static_cast<size_t>(lanes.rend() - pending - 1), *pending, duration};
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

  /// No probe begins afterwards. Waits for a running probe unless called from it.
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
        const bool continues = probe();
        lock.lock();
        if (!continues) {
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

/// One thread calls check().
class FailureDetector {
 public:
  struct Watched {
    std::string name;  ///< "the nccl communicator"
    Membership membership;
    std::function<std::vector<LaneProgress>()> lanes;
    std::function<std::string(const Stall&)> describe;  ///< the collective that did not end
    /// Throws an error that the backend found itself. Returns false if nothing can fail any more.
    std::function<bool()> poll_async_error;
    std::function<void(const std::string& reason)> abort;
  };

  /// `on_failure` may be null.
  FailureDetector(Watched watched, CollectiveFailureHandler on_failure,
                  std::shared_ptr<const StepTimeouts> timeouts,
                  std::shared_ptr<const AbortState> state)
      : watched_(std::move(watched)),
        on_failure_(std::move(on_failure)),
        timeouts_(std::move(timeouts)),
        state_(std::move(state)) {}

  /// Checks for stalled counters, then for the backend's own errors. Returns false when no further
  /// check is needed.
  bool check(StallDetector::TimePoint now = std::chrono::steady_clock::now()) {
    if (const auto stall = stalls_.check(watched_.lanes(), now, timeouts_->current())) {
      const auto what = concat(watched_.describe(*stall), " of ", watched_.name, ", rank ",
                               watched_.membership.rank, " of ", watched_.membership.world_size);
      fail(what, concat(what, ": no collective ended for ", stall->duration.count(),
                        " ms: a peer is lost, stuck, or makes other calls than this rank"));
      return false;
    }
    try {
      return watched_.poll_async_error();
    } catch (const std::exception& error) {
      fail("a collective of " + watched_.name, error.what());
    }
    return false;
  }

 private:
  void fail(const std::string& collective, const std::string& message) {
    if (state_->aborted()) {
      return;
    }
    log_error(message);
    // Peers are notified before this rank throws.
    if (on_failure_) {
      on_failure_({collective, timeouts_->step(), std::make_exception_ptr(PeerLostError(message))});
    }
    watched_.abort(message);
  }

  const Watched watched_;
  const CollectiveFailureHandler on_failure_;
  const std::shared_ptr<const StepTimeouts> timeouts_;
  const std::shared_ptr<const AbortState> state_;
  StallDetector stalls_{std::chrono::seconds(5)};
};

}  // namespace ddp::detail
