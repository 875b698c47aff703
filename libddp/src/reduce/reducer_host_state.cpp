// SPDX-License-Identifier: Apache-2.0
#include "reduce/reducer_host_state.hpp"

#include "reduce/reducer_impl.hpp"

namespace ddp {

bool Reducer::is_settled() const {
  const std::lock_guard lock(impl_->mutex);
  return (impl_->hooks_compared || impl_->communicator->world_size() == 1) &&
         !impl_->will_rebuild() && impl_->num_passes > (impl_->options.static_graph ? 1 : 0);
}

std::string Reducer::why_not_captured() const {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->options.find_unused_parameters && !impl_->options.static_graph) {
    return "ddp.find_unused_parameters=true reads on the host which parameters were used; set it "
           "to false, or ddp.static_graph=true";
  }
  if (impl_->hook != nullptr && !impl_->hook->capturable()) {
    return "the comm hook " + impl_->hook->name() + " keeps count of its steps on the host";
  }
  return {};
}

std::shared_ptr<const Reducer::HostState> Reducer::host_state() const {
  const std::lock_guard lock(impl_->mutex);
  auto state = std::make_shared<HostState>();
  for (const auto& parameter : impl_->parameters) {
    state->parameters.push_back({.grad = parameter.tensor.grad(),
                                 .set_aside = parameter.set_aside,
                                 .used = parameter.used,
                                 .reduced = parameter.reduced,
                                 .slot = parameter.slot});
  }
  state->weight = impl_->weight;
  state->device_weight = impl_->device_weight;
  state->is_weighted = impl_->is_weighted;
  state->num_passes = impl_->num_passes;
  state->num_local_passes = impl_->num_local_passes;
  state->previous_ready_order = impl_->previous_ready_order;
  state->previous_unused = impl_->previous_unused;
  state->unused_set_changed = impl_->unused_set_changed;
  state->buffers_sent = impl_->buffers_sent;
  return state;
}

void Reducer::HostState::finish_pending(Reducer& reducer) {
  auto& impl = *reducer.impl_;
  const std::lock_guard lock(impl.mutex);
  impl.buffer_broadcast.finish();
  impl.join_broken_pass();
}

bool Reducer::HostState::is_before_backward(const Reducer& reducer) const {
  const auto& impl = *reducer.impl_;
  const std::lock_guard lock(impl.mutex);
  return impl.num_passes != num_passes || impl.num_local_passes != num_local_passes;
}

std::string Reducer::HostState::why_not_replayed(const Reducer& reducer) const {
  const auto& impl = *reducer.impl_;
  const std::lock_guard lock(impl.mutex);
  const auto has_counts = [](const auto& state) {
    return state.weight != 0 || state.device_weight.defined();
  };
  if (has_counts(*this) || has_counts(impl)) {
    return "weighted_backward under no_sync() and the synchronised one after it are not in one "
           "step: hold all micro-batches of an optimizer step in it";
  }
  return {};
}

void Reducer::restore(const HostState& state) {
  auto& impl = *impl_;
  const std::lock_guard lock(impl.mutex);
  impl.communicator->launch_sequencer().end_pass(impl.model_id);
  impl.scheduler.begin_pass();
  for (auto& bucket : impl.buckets) {
    bucket.streams.clear();
    bucket.writers.clear();
    if (bucket.work != nullptr && impl.device().is_cpu()) {
      bucket.work->wait();  // it uses the arena; a captured one never began
    }
    bucket.work = nullptr;
  }
  for (size_t i = 0; i < impl.parameters.size(); ++i) {
    auto& parameter = impl.parameters[i];
    const auto& kept = state.parameters[i];
    parameter.tensor.mutable_grad() = kept.grad;
    parameter.set_aside = kept.set_aside;
    parameter.used = kept.used;
    parameter.reduced = kept.reduced;
    parameter.slot = kept.slot;
    parameter.fires = 0;
  }
  impl.weight = state.weight;
  impl.device_weight = state.device_weight;
  impl.is_weighted = state.is_weighted;
  impl.weight_work = nullptr;
  impl.used_work = nullptr;
  impl.num_passes = state.num_passes;
  impl.num_local_passes = state.num_local_passes;
  impl.previous_ready_order = state.previous_ready_order;
  impl.previous_unused = state.previous_unused;
  impl.unused_set_changed = state.unused_set_changed;
  impl.buffer_broadcast.finish();
  impl.buffers_sent = state.buffers_sent;
  impl.launched_beside = false;
  impl.ready_order.clear();
  impl.open_forwards.clear();
  impl.untracked_forwards = 0;
  impl.forward_since_pass = false;
  impl.refuses_second = false;
  impl.expects_sync = false;
  impl.unused_marked = false;
  impl.end_queued = false;
  impl.local_end_task = -1;
  impl.running_backwards.clear();
  impl.backward_trace.end();
  impl.is_measured = false;
  impl.measurement_decided = false;
  impl.takes_host_time = impl.takes_ready_times = false;
}

}  // namespace ddp
