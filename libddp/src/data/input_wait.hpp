// SPDX-License-Identifier: Apache-2.0
// What waits for batches cost: the time in which the device had no work, not that in which the host
// was early.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <deque>
#include <optional>
#include <utility>

#include "ops/streams/stream_order.hpp"

namespace ddp::detail {

/// Use from one thread.
class InputWait {
 public:
  explicit InputWait(at::Device device) : device_(device) {}

  /// No batch is ready, and the host begins to wait for one.
  void begin() {
    began_ = std::chrono::steady_clock::now();
    if (!device_.is_cpu()) {
      next_.emplace(device_);
      next_->begin.record(ops::detail::current_stream(device_));
    }
  }
  /// The batch is there, on a device behind what the current stream was made to wait for. Does
  /// nothing if no wait began.
  void end() {
    if (!began_) {
      return;
    }
    if (next_) {
      next_->end.record(ops::detail::current_stream(device_));
      spans_.push_back(std::move(*next_));
      next_.reset();
      while (!spans_.empty() && spans_.front().end.query()) {
        add_oldest();
      }
    } else {
      total_ms_ += Milliseconds(std::chrono::steady_clock::now() - *began_).count();
    }
    began_.reset();
  }

  /// A wait that began and failed does not count.
  void forget() { began_.reset(); }

  /// The sum so far. The host waits until the device has passed the last end().
  double milliseconds() {
    while (!spans_.empty()) {
      add_oldest();
    }
    return total_ms_;
  }

 private:
  using Milliseconds = std::chrono::duration<double, std::milli>;
  // The device passes both events at once if it is busy for longer than the host waits.
  struct Span {
    explicit Span(at::Device device)
        : begin(device.type(), c10::EventFlag::BACKEND_DEFAULT),
          end(device.type(), c10::EventFlag::BACKEND_DEFAULT) {}
    c10::Event begin, end;
  };

  void add_oldest() {
    Span& span = spans_.front();
    span.end.synchronize();
    total_ms_ += span.begin.elapsedTime(span.end);
    spans_.pop_front();
  }

  const at::Device device_;
  std::optional<std::chrono::steady_clock::time_point> began_;
  std::optional<Span> next_;
  std::deque<Span> spans_;  // that the device may not have passed
  double total_ms_ = 0;
};

}  // namespace ddp::detail
