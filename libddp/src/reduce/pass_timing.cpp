// SPDX-License-Identifier: Apache-2.0
#include "reduce/pass_timing.hpp"

#include <algorithm>

namespace ddp::detail {
namespace {
constexpr int64_t kMeasuredFirst = 10;
constexpr int64_t kMeasuredEvery = 100;
}  // namespace

void PassTiming::decide() {
  if (decided_) {
    return;
  }
  decided_ = true;
  measures_ = false;
  if (is_capturing(device_) || (pending_ && !wait_end_.is_over())) {
    return;
  }
  collect();
  forward_start_ = {};  // the forward of an earlier pass
  measures_ = sums_.count < kMeasuredFirst || num_passes_ % kMeasuredEvery == 0;
}

void PassTiming::begin_forward() {
  decided_ = false;  // forgets an earlier forward that had no backward
  decide();
  if (measures_) {
    forward_start_.record(device_);
  }
}

void PassTiming::begin_backward() {
  decide();
  if (measures_) {
    backward_start_.record(device_);
  }
}

void PassTiming::record_last_gradient() {
  if (measures_) {
    compute_end_.record(device_);
  }
}

void PassTiming::record_first_reduction() {
  if (measures_) {
    comm_start_.record(device_);
  }
}

void PassTiming::begin_wait() {
  is_replayed_ = is_replayed_ || is_capturing(device_);
  if (times_exposed()) {
    exposed_begin_.record_replayed(device_);
  }
}

void PassTiming::end_wait() {
  if (times_exposed()) {
    exposed_end_.record_replayed(device_);
  }
  if (measures_) {  // otherwise collect() may not have read wait_end_ yet
    wait_end_.record(device_);
  }
}

void PassTiming::end_pass() {
  ++num_passes_;
  pending_ = pending_ || measures_;
  measures_ = decided_ = false;
}

void PassTiming::abandon() {
  backward_trace_.end();
  measures_ = decided_ = false;
}

void PassTiming::collect() {
  if (!pending_) {
    return;
  }
  pending_ = false;
  if (forward_start_.recorded()) {
    sums_.forward += TimingEvent::milliseconds(forward_start_, backward_start_);
    ++sums_.num_forwards;
  }
  sums_.backward += TimingEvent::milliseconds(backward_start_, compute_end_);
  sums_.comm += TimingEvent::milliseconds(comm_start_, wait_end_);
  sums_.overlap += std::max(0.0, TimingEvent::milliseconds(comm_start_, compute_end_));
  ++sums_.count;
}

void PassTiming::add_to(DdpLoggingData& data) {
  collect();
  if (sums_.count > 0) {
    const auto count = static_cast<double>(sums_.count);
    data.avg_forward_compute_time =
        sums_.forward / static_cast<double>(std::max<int64_t>(1, sums_.num_forwards));
    data.avg_backward_compute_time = sums_.backward / count;
    data.avg_backward_comm_time = sums_.comm / count;
    data.avg_backward_compute_comm_overlap_time = sums_.overlap / count;
  }
}

}  // namespace ddp::detail
