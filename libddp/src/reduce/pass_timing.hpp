// SPDX-License-Identifier: Apache-2.0
// Measures how long a synchronised backward computes and communicates: the first 10 backwards, then
// every 100th. Events are read once the device has passed them, so no forward waits.
#pragma once

#include <cstdint>
#include <optional>

#include "core/log/step_waits.hpp"
#include "core/log/trace_recorder.hpp"
#include "ddp/detail/trace_scope.hpp"
#include "ddp/reduce/logging_data.hpp"
#include "ops/shared/timing_event.hpp"

namespace ddp::detail {

using ops::detail::is_capturing;
using ops::detail::TimingEvent;

class PassTiming {
 public:
  /// `times_replays`: replays of a captured backward also record the events of the exposed time. At
  /// world size 1 a captured backward records none, because it waits for nothing.
  PassTiming(at::Device device, bool times_replays)
      : device_(device), times_replays_(times_replays) {}

  void begin_forward();
  void begin_backward();
  void record_gradient() { backward_trace_.begin("backward", "compute"); }
  void record_last_gradient();
  void record_first_reduction();
  void end_backward() { backward_trace_.end(); }
  /// Between these two the compute stream (on the CPU: the host) waits for reductions.
  void begin_wait();
  void end_wait();
  void end_pass();
  /// Call when the pass was undone.
  void abandon();

  /// The exposed time of the last finished backward. The host waits for its end.
  double exposed_ms() const { return TimingEvent::milliseconds(exposed_begin_, exposed_end_); }
  /// Writes the averages. Waits for events that the device has not passed.
  void add_to(DdpLoggingData& data);

 private:
  void decide();
  void collect();
  bool times_exposed() const { return times_replays_ || !is_capturing(device_); }

  at::Device device_;
  bool times_replays_;
  TimingEvent forward_start_, backward_start_, compute_end_, comm_start_, wait_end_;
  TimingEvent exposed_begin_, exposed_end_;
  TraceSpan backward_trace_;  // from the first gradient on
  struct Sums {
    int64_t count = 0;
    int64_t num_forwards = 0;  // measured; a backward may have none
    double forward = 0, backward = 0, comm = 0, overlap = 0;
  } sums_;
  int64_t num_passes_ = 0;    // passes that ended
  bool decided_ = false;      // whether the running pass is measured
  bool measures_ = false;     // the running pass
  bool pending_ = false;      // the events of a pass were not read yet
  bool is_replayed_ = false;  // a backward was captured, and replays end no pass on the host
  const StepWait registered_{
      WaitKind::Reductions, [this] { return exposed_ms(); },
      [this] { return is_replayed_ ? std::nullopt : std::optional(num_passes_); }};
};

}  // namespace ddp::detail
