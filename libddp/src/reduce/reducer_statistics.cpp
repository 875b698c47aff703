// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "reduce/reducer_impl.hpp"

namespace ddp {
namespace {
constexpr int64_t kMeasuredFirst = 10;
constexpr int64_t kMeasuredEvery = 100;
}  // namespace

// The marks of the last measured pass are read when the device is past them, so that no forward
// ever waits; while they are still ahead, no new pass is measured.
void Reducer::Impl::decide_measurement() {
  if (measurement_decided) {
    return;
  }
  measurement_decided = true;
  is_measured = false;
  if (detail::is_capturing(device()) || (statistics_pending && !wait_end.is_over())) {
    return;
  }
  collect_statistics();
  is_measured = sums.count < kMeasuredFirst || num_passes % kMeasuredEvery == 0;
}

// Waits for the marks where the device has not passed them yet.
void Reducer::Impl::collect_statistics() {
  if (!statistics_pending) {
    return;
  }
  statistics_pending = false;
  using detail::TimeMark;
  if (forward_start.recorded()) {
    sums.forward += TimeMark::milliseconds(forward_start, backward_start);
  }
  sums.backward += TimeMark::milliseconds(backward_start, compute_end);
  sums.comm += TimeMark::milliseconds(comm_start, wait_end);
  sums.overlap += std::max(0.0, TimeMark::milliseconds(comm_start, compute_end));
  ++sums.count;
}

DdpLoggingData Reducer::Impl::logging_data() {
  collect_statistics();
  DdpLoggingData data;
  data.num_parameter_tensors = static_cast<int64_t>(parameters.size());
  for (const auto& parameter : parameters) {
    data.total_parameter_bytes += static_cast<int64_t>(parameter.tensor.nbytes());
  }
  data.bucket_sizes = initial_bucket_bytes;
  data.has_rebuilt_buckets = has_rebuilt;
  if (has_rebuilt) {
    for (const auto& state : buckets) {
      data.rebuilt_bucket_sizes.push_back(static_cast<int64_t>(state.bucket.buffer.nbytes()));
    }
    for (const auto& bucket : layout.buckets) {
      data.rebuilt_per_bucket_param_indices.push_back(bucket.parameters);
    }
  }
  data.prev_iteration_grad_ready_order_indices = previous_ready_order;
  data.unused_parameter_size = std::count(previous_unused.begin(), previous_unused.end(), true);
  data.can_set_static_graph = num_passes > 0 && !unused_set_changed;
  data.num_synchronised_backwards = num_passes;
  if (sums.count > 0) {
    const auto count = static_cast<double>(sums.count);
    data.avg_forward_compute_time = sums.forward / count;
    data.avg_backward_compute_time = sums.backward / count;
    data.avg_backward_comm_time = sums.comm / count;
    data.avg_backward_compute_comm_overlap_time = sums.overlap / count;
  }
  return data;
}

}  // namespace ddp
