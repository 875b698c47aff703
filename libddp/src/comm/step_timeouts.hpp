// SPDX-License-Identifier: Apache-2.0
// The limit of a collective, which is longer in a job's first step. Free of LibTorch.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace ddp::detail {

/// Shared by a communicator and the groups split from it. Any thread.
class StepTimeouts {
 public:
  StepTimeouts(std::chrono::milliseconds first_step, std::chrono::milliseconds later)
      : first_step_(first_step), later_(later) {}

  /// See Communicator::set_step.
  void set_step(int64_t step) { step_.store(step, std::memory_order_relaxed); }
  int64_t step() const { return step_.load(std::memory_order_relaxed); }
  /// Limit of a collective that is called now.
  std::chrono::milliseconds current() const { return step() < 1 ? first_step_ : later_; }
  std::chrono::milliseconds shortest() const { return std::min(first_step_, later_); }

 private:
  const std::chrono::milliseconds first_step_;
  const std::chrono::milliseconds later_;
  std::atomic<int64_t> step_{0};
};

}  // namespace ddp::detail
