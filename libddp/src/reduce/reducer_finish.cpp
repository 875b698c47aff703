// SPDX-License-Identifier: Apache-2.0
// The end of a backward: reductions are waited for and become .grad; and a backward of zeros for
// join.
#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <utility>

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
    take_buffer_of_hook(state);
    return;
  }
  state.work->wait();
  state.work = nullptr;
  if (is_weighted) {
    bucket.shard.mul_(bucket.inverse_divisor);
  } else if (scales_after_sum()) {
    bucket.shard.div_(bucket.divisor);
  }
}

// A hook may assign another tensor to bucket.buffer instead of writing into it.
void Reducer::Impl::take_buffer_of_hook(BucketState& state) const {
  const at::Tensor result = std::exchange(state.bucket.buffer, state.buffer);
  if (result.is_same(state.buffer)) {
    return;
  }
  if (!result.defined() || result.sizes() != state.buffer.sizes() ||
      result.scalar_type() != state.buffer.scalar_type() ||
      result.device() != state.buffer.device()) {
    const auto describe = [](const at::Tensor& tensor) {
      return tensor.defined() ? detail::concat(tensor.scalar_type(), " ", tensor.sizes(), " on ",
                                               tensor.device())
                              : std::string("an undefined tensor");
    };
    throw SettingsError(detail::concat("the comm hook ", hook->name(), " left ", describe(result),
                                       " in bucket.buffer of bucket ", state.bucket.index,
                                       ", which is ", describe(state.buffer),
                                       ": leave a tensor of the same shape, dtype and device"));
  }
  state.buffer.copy_(result);
}

// All of them, also where one throws: a reduction that nobody waits for would write into the next
// step's gradients.
void Reducer::Impl::finish_buckets() {
  std::exception_ptr first_problem;
  for (auto& state : buckets) {
    try {
      finish_bucket(state);
    } catch (...) {
      first_problem = first_problem ? first_problem : std::current_exception();
    }
  }
  if (first_problem) {
    std::rethrow_exception(first_problem);
  }
}

// Runs on the engine when the whole backward is over, with the caller's streams current.
void Reducer::Impl::finish_pass() {
  const at::NoGradGuard no_grad;
  const ops::AutocastOff autocast_off(device().type());
  const std::lock_guard lock(mutex);
  backward_trace.end();
  const TraceScope trace("wait for reductions", "compute");
  const bool marks_replays = communicator->world_size() > 1;  // at 1 nothing is waited for
  if (marks_replays || !detail::is_capturing(device())) {
    exposed_begin.record_replayed(device());
  }
  buffer_broadcast.finish();
  if (is_weighted) {
    weight_work->wait();
    weight_work = nullptr;
    // No counted item on any rank: the gradient of nothing is zero.
    weight_sum.copy_(
        at::where(weight_sum > 0, weight_sum.reciprocal(), at::zeros_like(weight_sum)));
  }
  finish_buckets();
  if (std::exchange(launched_beside, false)) {  // a captured stream has to be joined
    detail::wait_for(*launch_stream, detail::current_stream(device()));
  }
  add_set_aside();
  if (marks_replays || !detail::is_capturing(device())) {
    exposed_end.record_replayed(device());
  }
  wait_end.record(device());
  const auto used = globally_used();
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto& parameter = parameters[i];
    if (used.empty() || used[i]) {
      parameter.tensor.mutable_grad() = parameter.slot.memory;
      parameter.reduced = true;
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
  takes_host_time = takes_ready_times = false;
  statistics_pending = statistics_pending || is_measured;
  is_measured = false;
  measurement_decided = false;
  previous_ready_order = ready_order;
  ++num_passes;
  expects_sync = false;
  is_weighted = false;
  weight = 0;
  device_weight = at::Tensor();
  end_forwards_of_pass();
}

// To what a reduction left, gradients can be added where it is the whole mean.
void Reducer::Impl::refuse_partial(const Parameter& parameter) const {
  if (shards) {
    throw SettingsError(
        "with optimizer.zero1=true the gradient of " + parameter.name +
        " from the previous synchronised backward is reduced in this rank's part only and cannot "
        "be added to: call zero_grad() or the optimizer's step before the next backward, and run "
        "all but the last backward of a step under no_sync()");
  }
}

// Every slot that this backward wrote becomes .grad; others stay as they are.
void Reducer::Impl::attach_gradients() {
  const at::NoGradGuard no_grad;
  const ops::AutocastOff autocast_off(device().type());
  for (const auto& bucket : layout.buckets) {
    gather_parameter_lists(bucket.parameters);
  }
}

// The mean of (mean + own) over the ranks is the sum of both means, but only where the sum is
// divided by the number of ranks. Where it will not be, what earlier passes left in the slots stays
// out of the reduction.
void Reducer::Impl::set_reduced_aside() {
  const at::NoGradGuard no_grad;
  for (auto& parameter : parameters) {
    const at::Tensor& grad = parameter.tensor.grad();
    if (parameter.reduced && grad.defined() && grad.is_alias_of(parameter.slot.memory) &&
        !parameter.set_aside.defined()) {
      refuse_partial(parameter);
      parameter.set_aside = parameter.slot.memory.clone();
      parameter.slot.memory.zero_();
    }
  }
}

void Reducer::Impl::add_set_aside() {
  for (auto& parameter : parameters) {
    if (parameter.set_aside.defined()) {
      parameter.slot.memory.add_(parameter.set_aside);
      parameter.set_aside = at::Tensor();
    }
  }
}

void Reducer::Impl::shadow() {
  {
    const std::lock_guard lock(mutex);
    begin_pass();
    if (weight != 0 || device_weight.defined()) {
      is_weighted = true;
    }
    for (auto& state : buckets) {
      state.bucket.buffer.zero_();
    }
    for (auto& parameter : parameters) {
      parameter.used = false;
      parameter.set_aside = at::Tensor();
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
