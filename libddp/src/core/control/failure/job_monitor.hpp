// SPDX-License-Identifier: Apache-2.0
// The mutex of a control plane, and waits on it that the end of its generation ends.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "core/control/failure/first_failure.hpp"
#include "core/control/running_clock.hpp"
#include "core/control/wire/tcp_socket.hpp"

namespace ddp::detail {

/// The caller holds the mutex, except for lock(), mutex(), failed(), throw_if_failed(),
/// first_cause() and failure(). A constructor needs no mutex before its thread starts.
class JobMonitor {
 public:
  using Lock = std::unique_lock<std::mutex>;

  /// `longest_turn` is the longest time between two ticks of a running process.
  JobMonitor(int64_t generation, std::chrono::milliseconds longest_turn)
      : clock_(longest_turn), failure_(generation) {}

  Lock lock() { return Lock(mutex_); }
  std::mutex& mutex() { return mutex_; }
  void notify() { changed_.notify_all(); }

  /// Time of the running clock, which all limits use except the heartbeat interval.
  SteadyTime now() const { return clock_.now(); }
  /// Called in each turn of the background thread. Returns the running clock's time of `steady`.
  SteadyTime tick(SteadyTime steady) {
    clock_.tick(steady);
    return clock_.at(steady);
  }

  /// How long this process was stopped, if it runs again since less than a second.
  std::chrono::milliseconds recent_stop() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(
        clock_.recent_loss(std::chrono::seconds(1)));
  }

  /// Waits for `condition` or a failure.
  template <typename Condition>
  void wait(Lock& lock, Condition condition) {
    changed_.wait(lock, [&] { return condition() || failed(); });
  }
  /// Waits for `condition`, a failure, or `deadline` of the running clock. Returns whether
  /// `condition` holds; throws the failure if it does not.
  template <typename Condition>
  bool wait_until(Lock& lock, SteadyTime deadline, Condition condition) {
    while (!condition() && !failed() && now() < deadline) {
      changed_.wait_for(
          lock, std::min<RunningClock::Duration>(deadline - now(), std::chrono::seconds(1)));
    }
    const bool holds = condition();
    if (!holds) {
      throw_if_failed();
    }
    return holds;
  }
  /// Waits for `condition` or `limit` of the steady clock, whether or not the job failed.
  template <typename Condition>
  void wait_despite_failure(Lock& lock, std::chrono::milliseconds limit, Condition condition) {
    changed_.wait_until(lock, std::chrono::steady_clock::now() + limit, condition);
  }

  bool failed() const { return failure_.failed(); }
  void throw_if_failed() const {
    if (failed()) {
      throw_failure(first_cause());
    }
  }
  /// A default cause if no rank has failed.
  FailureCause first_cause() const { return failure_.get(); }
  /// Gives access to the callbacks.
  FirstFailure& failure() { return failure_; }
  /// Sets the first cause. `found_here`: this rank found it and logs it as its own; otherwise
  /// rank 0 reported it. Returns false if an earlier cause is set.
  bool set_failure(const FailureCause& cause, bool found_here) {
    if (!failure_.set(cause)) {
      return false;
    }
    found_here_ = found_here;
    notify();
    return true;
  }
  bool found_failure_here() const { return found_here_; }
  /// All ranks have called close(). From now on a closed connection is no failure.
  void set_closing() { closing_ = true; }
  /// Nothing that ranks of this generation do from now on is a failure.
  bool is_over() const { return closing_ || failed(); }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  RunningClock clock_;
  FirstFailure failure_;
  bool found_here_ = false;
  bool closing_ = false;
};

}  // namespace ddp::detail
