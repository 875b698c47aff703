// SPDX-License-Identifier: Apache-2.0
// State that a communicator shares with its works, its watchdog and the groups split from it. Free
// of LibTorch.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <string>

#include "core/launch/training_state.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

/// Whether a communicator was aborted. Its works, which may outlive it, share this. Any thread.
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

/// The time limit of a collective, which is longer in a job's first step. That step ends when the
/// program announces step 1. Of a program that announces none, it ends when a wrapped model runs
/// forward after its first reduced backward. Any thread.
class StepTimeouts {
 public:
  StepTimeouts(std::chrono::milliseconds first_step, std::chrono::milliseconds later)
      : first_step_(first_step), later_(later) {}

  /// See Communicator::set_step.
  void set_step(int64_t step) { step_.store(step, std::memory_order_relaxed); }
  /// -1 if none was announced.
  int64_t step() const { return step_.load(std::memory_order_relaxed); }
  /// Limit of a collective that is called now.
  std::chrono::milliseconds current() const {
    const bool is_first = step() < 0 ? !training_.has_ended_first_step() : step() < 1;
    return is_first ? first_step_ : later_;
  }
  std::chrono::milliseconds shortest() const { return std::min(first_step_, later_); }

 private:
  const std::chrono::milliseconds first_step_;
  const std::chrono::milliseconds later_;
  const TrainingWatch training_;
  std::atomic<int64_t> step_{-1};
};

/// A collective that failed on this rank: it timed out, or MPI or NCCL returned an error.
struct CollectiveFailure {
  std::string collective;  ///< "all_reduce #7 (…) of the mpi communicator, rank 1 of 4"
  int64_t step = -1;       ///< from Communicator::set_step
  std::exception_ptr error;
};

/// Called once, on the thread that detected the failure, and not for aborts. With MPI the
/// communicator is already aborted. With NCCL it aborts when the handler returns.
using CollectiveFailureHandler = std::function<void(const CollectiveFailure&)>;

/// Returns what() of `error`.
std::string message_of(const std::exception_ptr& error);

}  // namespace ddp::detail
