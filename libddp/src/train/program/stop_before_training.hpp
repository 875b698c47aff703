// SPDX-License-Identifier: Apache-2.0
// A stop request before there is anything to save. Torch-free.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "core/control/failure/exit_deadline.hpp"
#include "core/control/failure/failure_cause.hpp"
#include "core/control/failure/failure_policy.hpp"
#include "core/launch/training_state.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

/// Ends the job with code 75 when a stop is requested before the first step: while the program
/// waits for other ranks, prepares data or loads weights. Such phases need no checks of their own.
/// Every rank learns of the request. A rank ends when it next waits for another rank, at the latest
/// after the failure policy's time.
class StopBeforeTraining {
 public:
  StopBeforeTraining() : thread_([this](const std::stop_token& end) { run(end); }) {}

  /// The ranks are connected; `plane` must stay until finish().
  void watch(ControlPlane& plane) {
    const std::lock_guard lock(mutex_);
    plane_ = &plane;
  }
  /// The program's function has ended.
  void finish() {
    thread_.request_stop();
    const std::lock_guard lock(mutex_);
    plane_ = nullptr;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kPoll{50};
  /// Phases that check for requests themselves, as the wait for a folder, report more.
  static constexpr std::chrono::seconds kPatience{1};

  void run(const std::stop_token& end) {
    std::unique_lock lock(mutex_);
    auto asked = Clock::time_point::max();
    while (!has_training_state()) {
      if (is_stop_requested()) {
        asked = std::min(asked, Clock::now());
      }
      if (asked <= Clock::now() - kPatience) {
        FailureCause cause;
        cause.message = "a stop was requested, and there is nothing to save yet";
        cause.exit_code = ExitCode::SavedRequeue;
        const auto ranks = plane_ == nullptr ? Membership{} : plane_->membership();
        deadline_.arm(job_end_after(cause, ranks));  // only the first call counts
        if (plane_ != nullptr) {
          plane_->publish_failure(cause);
          return;
        }
      }
      if (wake_.wait_for(lock, end, kPoll, [] { return false; }); end.stop_requested()) {
        return;
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable_any wake_;
  ControlPlane* plane_ = nullptr;
  ExitDeadline deadline_;
  std::jthread thread_;  // last: ends before the members that it uses
};

}  // namespace ddp::detail
