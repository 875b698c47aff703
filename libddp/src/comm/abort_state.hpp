// SPDX-License-Identifier: Apache-2.0
// Whether a communicator was aborted. Free of LibTorch.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "ddp/core/error.hpp"

namespace ddp::detail {

/// Shared with the communicator's works, which may outlive it. Any thread.
class AbortState {
 public:
  /// Returns true for the first call.
  bool abort(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    if (aborted_) {
      return false;
    }
    reason_ = reason;
    aborted_.store(true, std::memory_order_release);
    return true;
  }
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  /// Throws PeerLostError after abort().
  void check(const char* operation) const {
    if (aborted()) [[unlikely]] {
      const std::lock_guard lock(mutex_);
      throw PeerLostError(concat(operation, ": the communicator was aborted: ", reason_));
    }
  }

 private:
  std::atomic<bool> aborted_{false};
  mutable std::mutex mutex_;
  std::string reason_;
};

}  // namespace ddp::detail
