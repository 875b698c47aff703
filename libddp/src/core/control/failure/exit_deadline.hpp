// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <thread>

#include "core/control/failure/failure_policy.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {

/// Last resort of a failing generation. Once armed, the process ends as given unless this object is
/// destroyed in time. This bounds destructors that wait for a peer, or for a GPU that waits for a
/// peer.
class ExitDeadline {
 public:
  /// Only the first call counts. Any thread, but not during destruction.
  void arm(const JobEnd& end) {
    std::call_once(armed_, [&] {
      thread_ = std::jthread([end](const std::stop_token& stop) {
        std::mutex mutex;
        std::condition_variable_any destroyed;
        std::unique_lock lock(mutex);
        destroyed.wait_for(lock, stop, end.exit_within, [] { return false; });
        if (!stop.stop_requested()) {
          log_error(concat("this rank could not end within ", end.exit_within.count(),
                           " ms after the failure and leaves without cleaning up"));
          _exit(static_cast<int>(end.exit_code));
        }
      });
    });
  }

 private:
  std::once_flag armed_;
  std::jthread thread_;
};

}  // namespace ddp::detail
