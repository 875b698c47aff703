// SPDX-License-Identifier: Apache-2.0
// Points in time on a device's current stream, or on the host for CPU tensors.
#pragma once

#include <c10/core/Event.h>

#include <chrono>
#include <optional>

#include "ops/streams/stream_order.hpp"

namespace ddp::ops::detail {

/// Whether the current stream of `device` is being captured into a graph; record() then does
/// nothing.
bool is_capturing(at::Device device);

/// Delays the current stream of a CUDA device by about this long (at most 200 ms). Does nothing on
/// other devices.
void delay_device(at::Device device, double milliseconds);

/// One point in time.
class TimingEvent {
 public:
  /// Enqueues the event. The host does not wait.
  void record(at::Device device, std::optional<c10::Stream> stream = std::nullopt) {
    recorded_ = !is_capturing(device);
    if (!recorded_) {
      return;
    }
    if (device.is_cpu()) {
      host_ = std::chrono::steady_clock::now();
      return;
    }
    if (!event_) {
      event_.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    }
    event_->record(stream.value_or(current_stream(device)));
  }

  /// Like record(), but also inside a capture, where every replay records the event again. A
  /// capture needs an earlier record(), else nothing is recorded.
  void record_replayed(at::Device device) {
    if (is_capturing(device)) {
      record_in_capture(device);
    } else {
      record(device);
    }
  }

  bool recorded() const { return recorded_; }
  /// Whether the device has passed the event. Never waits.
  bool is_over() const { return !recorded_ || !event_ || event_->query(); }

  /// Returns the milliseconds from `begin` to `end`, 0 if one was not recorded. The host waits for
  /// `end`.
  static double milliseconds(const TimingEvent& begin, const TimingEvent& end) {
    if (!begin.recorded_ || !end.recorded_) {
      return 0;
    }
    if (!end.event_) {
      return std::chrono::duration<double, std::milli>(end.host_ - begin.host_).count();
    }
    end.event_->synchronize();
    return begin.event_->elapsedTime(*end.event_);
  }

 private:
  void record_in_capture(at::Device device);

  bool recorded_ = false;
  std::chrono::steady_clock::time_point host_;
  std::optional<c10::Event> event_;
};

}  // namespace ddp::ops::detail
