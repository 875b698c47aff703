// SPDX-License-Identifier: Apache-2.0
// The end of a backward: reductions are waited for and become .grad; and a backward of zeros for
// join.
#include <ATen/ATen.h>

#include <algorithm>

#include "ddp/ops/autocast_off.hpp"
#include "reduce/reducer_impl.hpp"

namespace ddp {

bool Reducer::Impl::scales_after_sum() const {
  return is_weighted || (divisor != 0 && divisor != communicator->world_size());
}

void Reducer::Impl::finish_bucket(BucketState& state) {
  auto& bucket = state.bucket;
  if (hook) {
    hook->finish(bucket);
    return;
  }
  state.work->wait();
  state.work = nullptr;
  if (is_weighted) {
    bucket.buffer.mul_(bucket.inverse_divisor);
  } else if (scales_after_sum()) {
    bucket.buffer.div_(bucket.divisor);
  }
}

// Runs on the engine when the whole backward is over, with the caller's streams current.
void Reducer::Impl::finish_pass() {
  const at::NoGradGuard no_grad;
  const ops::AutocastOff autocast_off(device().type());
  const std::lock_guard lock(mutex);
  backward_trace.end();
  const TraceScope trace("wait for reductions", "compute");
  wait_begin.record(device());
  if (is_weighted) {
    weight_work->wait();
    weight_work = nullptr;
    // No counted item on any rank: the gradient of nothing is zero.
    weight_sum.copy_(
        at::where(weight_sum > 0, weight_sum.reciprocal(), at::zeros_like(weight_sum)));
  }
  for (auto& state : buckets) {
    finish_bucket(state);
  }
  wait_end.record(device());
  const auto used = globally_used();
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto& parameter = parameters[i];
    if (used.empty() || used[i]) {
      parameter.tensor.mutable_grad() = parameter.slot.memory;
    }
    parameter.slot.written = false;
  }
  std::vector<bool> unused;
  for (auto& parameter : parameters) {
    unused.push_back(!parameter.used);
    parameter.used = false;
  }
  unused_set_changed = unused_set_changed || (num_passes > 0 && unused != previous_unused);
  previous_unused = std::move(unused);
  statistics_pending = statistics_pending || is_measured;
  is_measured = false;
  measurement_decided = false;
  previous_ready_order = ready_order;
  ++num_passes;
  expects_sync = false;
  is_weighted = false;
  weight = 0;
  // Forward, forward, backward, backward: the second backward is synchronised too. What it adds to
  // .grad is this rank's own gradient, and the mean of (mean + own) is the sum of the two means.
  pending_forwards = options.find_unused_parameters || options.static_graph
                         ? 0
                         : std::max(0, pending_forwards - 1);
  if (pending_forwards > 0) {
    begin_pass();
  }
}

void Reducer::Impl::shadow() {
  {
    const std::lock_guard lock(mutex);
    begin_pass();
    pending_forwards = 1;
    if (weight != 0) {
      is_weighted = true;
    }
    for (auto& state : buckets) {
      state.bucket.buffer.zero_();
    }
    for (auto& parameter : parameters) {
      parameter.used = false;
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      scheduler.mark_ready(static_cast<int>(i));
      ready_order.push_back(static_cast<int>(i));
    }
    for (size_t b = 0; b < buckets.size(); ++b) {
      communicator->launch_sequencer().bucket_ready(model_id, static_cast<int>(b));
    }
  }
  communicator->launch_sequencer().flush();
}

}  // namespace ddp
