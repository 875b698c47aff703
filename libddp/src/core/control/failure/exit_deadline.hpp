// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <thread>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {

/// Last resort of a failing job. Once armed, the process ends with `exit_code` unless this object
/// is destroyed within `grace`. This bounds destructors that wait for a peer, or for a GPU that
/// waits for a peer.
class ExitDeadline {
 public:
  /// Only the first call counts. Any thread, but not during destruction.
  void arm(int exit_code, std::chrono::milliseconds grace) {
    std::call_once(armed_, [&] {
      thread_ = std::jthread([grace, exit_code](const std::stop_token& stop) {
        std::mutex mutex;
        std::condition_variable_any destroyed;
        std::unique_lock lock(mutex);
        destroyed.wait_for(lock, stop, grace, [] { return false; });
        if (!stop.stop_requested()) {
          log_error(concat("this rank could not end within ", grace.count(),
                           " ms after the failure and leaves without cleaning up"));
          _exit(exit_code);
        }
      });
    });
  }

 private:
  std::once_flag armed_;
  std::jthread thread_;
};

}  // namespace ddp::detail
