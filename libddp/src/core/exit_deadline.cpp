// SPDX-License-Identifier: Apache-2.0
#include "core/exit_deadline.hpp"

#include <unistd.h>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {

ExitDeadline::~ExitDeadline() {
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

void ExitDeadline::arm(int exit_code) {
  const std::lock_guard lock(mutex_);
  if (!done_ && !thread_.joinable()) {
    thread_ = std::thread([this, exit_code] { wait(exit_code); });
  }
}

void ExitDeadline::wait(int exit_code) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, grace_, [this] { return done_; })) {
    log_error(concat("this rank could not end within ", grace_.count(),
                     " ms after the failure and leaves without cleaning up"));
    _exit(exit_code);
  }
}

}  // namespace ddp::detail
