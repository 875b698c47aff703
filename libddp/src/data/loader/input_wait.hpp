// SPDX-License-Identifier: Apache-2.0
// What waits for batches cost: the time in which the device had no work, not that in which the host
// was early.
#pragma once

#include <c10/core/Device.h>

#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "core/log/step_waits.hpp"
#include "ops/shared/timing_event.hpp"

namespace ddp::detail {

/// Metrics reads it, maybe from another thread than the loader's.
class InputWait {
 public:
  explicit InputWait(at::Device device) : device_(device) {}
  InputWait(const InputWait&) = delete;
  InputWait& operator=(const InputWait&) = delete;
  /// Spans that the device has not passed yet are lost: a destructor must not wait for a device
  /// whose peers may have failed.
  ~InputWait() {
    const std::lock_guard lock(mutex_);
    try {
      add_passed();
    } catch (...) {  // the device failed
    }
    spans_.clear();
  }

  /// No batch is ready, and the host begins to wait for one.
  void begin() {
    const std::lock_guard lock(mutex_);
    next_.emplace().begin.record(device_);
  }
  /// The batch is there, on a device behind what the current stream was made to wait for. Does
  /// nothing if no wait began.
  void end() {
    const std::lock_guard lock(mutex_);
    if (!next_) {
      return;
    }
    next_->end.record(device_);
    spans_.push_back(std::move(*next_));
    next_.reset();
    add_passed();
  }
  /// A wait that began and failed does not count.
  void forget() {
    const std::lock_guard lock(mutex_);
    next_.reset();
  }

  /// The sum so far. The host waits until the device has passed the last end().
  double milliseconds() {
    const std::lock_guard lock(mutex_);
    while (!spans_.empty()) {
      add_oldest();
    }
    return total_ms_;
  }

 private:
  // The device passes both events at once if it is busy for longer than the host waits.
  struct Span {
    ops::detail::TimingEvent begin, end;
  };

  void add_passed() {
    while (!spans_.empty() && spans_.front().end.is_over()) {
      add_oldest();
    }
  }
  void add_oldest() {
    const Span& span = spans_.front();
    total_ms_ += ops::detail::TimingEvent::milliseconds(span.begin, span.end);
    spans_.pop_front();
  }

  const at::Device device_;
  std::mutex mutex_;
  std::optional<Span> next_;
  std::deque<Span> spans_;  // that the device may not have passed
  double total_ms_ = 0;
  const StepWait registered_{WaitKind::Batches, [this] { return milliseconds(); }};
};

}  // namespace ddp::detail
