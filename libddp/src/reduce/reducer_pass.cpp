// SPDX-License-Identifier: Apache-2.0
// One backward, from the forward that expects it to the launch of its last bucket.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>

#include "ddp/core/logging.hpp"
#include "ddp/ops/autocast_off.hpp"
#include "reduce/reducer_impl.hpp"

namespace ddp {
namespace {

bool aliases(const at::Tensor& grad, const at::Tensor& slot) {
  return grad.data_ptr() == slot.data_ptr() && grad.scalar_type() == slot.scalar_type() &&
         grad.is_alias_of(slot);
}

}  // namespace

void Reducer::Impl::check_previous_pass() const {
  if (!expects_sync || scheduler.num_ready() == 0 || scheduler.all_ready()) {
    return;
  }
  std::string missing;
  int count = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!scheduler.is_ready(static_cast<int>(i)) && ++count <= 10) {
      missing += (count > 1 ? ", " : "") + parameters[i].name;
    }
  }
  throw MismatchError(detail::concat(
      "the previous backward left ", count, " of ", parameters.size(),
      " parameters without a gradient: ", missing, count > 10 ? ", …" : "",
      options.static_graph
          ? ". The graph changed although ddp.static_graph=true: set it to false"
          : ". Set ddp.find_unused_parameters=true if the model does not use all its parameters in "
            "every step, or make all of its outputs take part in the loss"));
}

void Reducer::Impl::check_parameters() const {
  for (const auto& parameter : parameters) {
    if (!parameter.tensor.requires_grad()) {
      throw SettingsError("parameter " + parameter.name +
                          " no longer requires a gradient: freeze parameters before wrapping the "
                          "module, or wrap it again");
    }
    if (torch::autograd::impl::try_get_grad_accumulator(parameter.tensor) !=
        parameter.accumulator) {
      throw SettingsError(
          "parameter " + parameter.name +
          " was replaced after wrapping (module->to(dtype or device)?): convert the "
          "module first, then wrap it");
    }
  }
}

void Reducer::Impl::begin_pass() {
  scheduler.begin_pass();
  join_broken_pass();
  for (auto& state : buckets) {
    state.streams.clear();
    state.writers.clear();
    state.work = nullptr;
    state.bucket.buffer = state.buffer;  // a hook that threw may have left another one
  }
  for (auto& parameter : parameters) {
    parameter.fires = 0;
  }
  forget_writes();
  ready_order.clear();
  unused_marked = false;
  end_queued = false;
  expects_sync = true;
  communicator->launch_sequencer().begin_pass(
      model_id, static_cast<int>(buckets.size()), [this](int bucket) { launch(bucket); },
      [this] { finish_pass(); });
}

// Those of a backward that an exception ended: nothing may be added to them.
void Reducer::Impl::forget_writes() {
  for (auto& parameter : parameters) {
    parameter.slot.written = false;
    parameter.slot.stream = std::nullopt;
  }
}

void Reducer::Impl::prepare(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard lock(mutex);
  check_previous_pass();
  check_parameters();
  if (reads_used_map() && detail::is_capturing(device())) {
    throw SettingsError(
        "ddp.find_unused_parameters=true reads a map on the host in every step and cannot be "
        "captured "
        "in a CUDA graph: set it to false, or ddp.static_graph=true and capture after the first "
        "step");
  }
  open_forward(outputs);
  if (options.static_graph && num_passes == 0) {
    // The end of the counting pass must belong to the outermost backward, which is the one that
    // reaches an output; a parameter's hook may fire inside a nested one (checkpointing).
    for (const auto& output : outputs) {
      if (output.defined() && output.requires_grad() && !output.is_leaf()) {  // see open_forward
        output.register_hook([this, alive = std::weak_ptr(lifetime)](const at::Tensor& /*grad*/) {
          if (alive.expired()) {
            return;  // the graph outlived the wrapper
          }
          const std::lock_guard hook_lock(mutex);
          if (num_passes == 0) {
            queue_static_graph_end();
          }
        });
      }
    }
  }
  local_forward = false;
  begin_pass();
  decide_measurement();
  if (is_measured) {
    backward_start.record(device());
  }
  begin_ready_times();
}

void Reducer::Impl::check_gradient(const Parameter& parameter) const {
  if (at::GradMode::is_enabled()) {
    throw SettingsError("backward(create_graph=true) reached parameter " + parameter.name +
                        ": gradients of gradients are not reduced; use torch::autograd::grad");
  }
  const at::Tensor& grad = parameter.tensor.grad();
  if (grad.defined() && grad.layout() != at::kStrided) {
    throw SettingsError("parameter " + parameter.name +
                        " got a sparse gradient: only dense ones are reduced (for an embedding set "
                        "sparse(false))");
  }
}

// Neither a forward of the wrapper nor one under no_sync() comes before it: the module was called.
void Reducer::Impl::warn_unannounced(const Parameter& parameter) {
  if (local_forward || warned_unannounced || communicator->world_size() == 1) {
    return;
  }
  warned_unannounced = true;
  log_warning(detail::concat(
      "backward gave parameter ", parameter.name,
      " a gradient, but no forward of its DistributedDataParallel announced that: the gradient "
      "stays this rank's own and the replicas part; fix: call the wrapper's forward "
      "(model.forward(x), not module->forward(x)), or model.prepare_for_backward({loss}) before "
      "the backward"));
}

void Reducer::Impl::on_gradient(int index) {
  const std::lock_guard lock(mutex);
  auto& parameter = parameters[static_cast<size_t>(index)];
  check_gradient(parameter);
  parameter.used = true;
  backward_trace.begin("backward", "compute");
  if (!expects_sync) {
    refuse_second_backward();
    warn_unannounced(parameter);
    // no_sync, or a backward no wrapped forward announced: only bring the gradient into its slot
    // when this backward ends. Queued at the first hook: running at the end of a nested backward is
    // harmless, a later hook queues it again.
    const int task = torch::autograd::get_current_graph_task_id();
    if (local_end_task != task) {
      local_end_task = task;
      torch::autograd::Engine::get_default_engine().queue_callback([this] {
        const std::lock_guard callback_lock(mutex);
        local_end_task = -1;
        ++num_local_passes;
        backward_trace.end();
        attach_gradients();
      });
    }
    return;
  }
  note_backward();
  if (options.static_graph) {
    on_gradient_static_graph(index);
    return;
  }
  mark_unused_parameters();
  mark_ready(index);
}

void Reducer::Impl::on_gradient_static_graph(int index) {
  auto& parameter = parameters[static_cast<size_t>(index)];
  ++parameter.fires;
  if (num_passes == 0) {
    if (parameter.fires == 1) {
      ready_order.push_back(index);
    }
    queue_static_graph_end();
    return;
  }
  if (parameter.fires > parameter.expected_fires) {
    throw MismatchError(
        detail::concat("parameter ", parameter.name, " got its gradient ", parameter.fires,
                       " times in this backward and ", parameter.expected_fires,
                       " times in the first one, although ddp.static_graph=true: the "
                       "graph changed; set it to false"));
  }
  mark_unused_parameters();
  if (parameter.fires == parameter.expected_fires) {
    mark_ready(index);
  }
}

void Reducer::Impl::queue_static_graph_end() {
  if (!end_queued && expects_sync) {
    end_queued = true;
    torch::autograd::Engine::get_default_engine().queue_callback(
        [this] { end_static_graph_count(); });
  }
}

void Reducer::Impl::end_static_graph_count() {
  const std::lock_guard lock(mutex);
  const auto order = std::move(ready_order);
  ready_order.clear();
  for (auto& parameter : parameters) {
    parameter.expected_fires = parameter.fires;
  }
  mark_unused_parameters();
  for (const int index : order) {
    mark_ready(index);
  }
}

// Parameters that will get no gradient in this pass count as ready at its first hook, so that their
// buckets fill; what they contribute is zero.
void Reducer::Impl::mark_unused_parameters() {
  if (unused_marked) {
    return;
  }
  unused_marked = true;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const bool unused = options.static_graph ? parameters[i].expected_fires == 0
                                             : options.find_unused_parameters && !reachable[i];
    if (unused) {
      mark_ready(static_cast<int>(i));
    }
  }
}

// The stream that is current in the hook, and the one on which an op wrote the slot.
void Reducer::Impl::note_streams(int bucket, const ops::GradSlot& slot) {
  if (device().is_cpu()) {
    return;
  }
  const auto note = [](std::vector<c10::Stream>& streams, const c10::Stream& stream) {
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
      streams.push_back(stream);
    }
  };
  auto& state = buckets[static_cast<size_t>(bucket)];
  note(state.streams, detail::current_stream(device()));
  if (slot.stream) {
    note(state.writers, *slot.stream);
  }
}

void Reducer::Impl::mark_ready(int index) {
  using Mark = detail::BucketScheduler::Mark;
  const auto mark = scheduler.mark_ready(index);
  if (mark == Mark::Twice) {
    throw MismatchError(detail::concat(
        "parameter ", parameters[static_cast<size_t>(index)].name,
        " got its gradient twice in one backward (re-entrant checkpointing, or a parameter used by "
        "several backwards of one forward): set ddp.static_graph=true if every step does so"));
  }
  ready_order.push_back(index);
  const int bucket = layout.places[static_cast<size_t>(index)].bucket;
  const auto& slot = parameters[static_cast<size_t>(index)].slot;
  note_streams(bucket, slot);
  note_ready_time(index, mark == Mark::AllReady);
  if (mark == Mark::Pending) {
    return;
  }
  gather(bucket);
  if (mark == Mark::AllReady) {
    if (is_measured) {
      compute_end.record(device());
    }
    // Not earlier: a callback queued inside a nested backward runs at *its* end, and by now every
    // gradient is there.
    torch::autograd::Engine::get_default_engine().queue_callback(
        [group = communicator] { group->launch_sequencer().flush(); });
  }
  communicator->launch_sequencer().bucket_ready(model_id, bucket);
}

void Reducer::Impl::gather(int bucket) {
  const at::NoGradGuard no_grad;
  const ops::AutocastOff autocast_off(device().type());
  auto& state = buckets[static_cast<size_t>(bucket)];
  for (const auto& stream : state.streams) {
    detail::wait_for(stream,
                     detail::current_stream(device()));  // gradients accumulated on another stream
  }
  gather_parameter_lists(layout.buckets[static_cast<size_t>(bucket)].parameters);
  for (const int index : layout.buckets[static_cast<size_t>(bucket)].parameters) {
    auto& parameter = parameters[static_cast<size_t>(index)];
    if (!parameter.tensor.grad().defined() && !parameter.slot.written) {
      parameter.slot.memory.zero_();  // unused here: it contributes nothing
    }
  }
}

// Brings what AccumulateGrad left in .grad into the slots: one multi-tensor copy (which also casts)
// and, where a fused op wrote a slot already in this backward, one multi-tensor add. Afterwards
// .grad is the slot.
void Reducer::Impl::gather_parameter_lists(const std::vector<int>& indices) {
  std::vector<at::Tensor> copy_to, copy_from, add_to, add_from;
  for (const int index : indices) {
    auto& parameter = parameters[static_cast<size_t>(index)];
    at::Tensor& grad = parameter.tensor.mutable_grad();
    at::Tensor& slot = parameter.slot.memory;
    if (grad.defined() && !aliases(grad, slot)) {
      parameter.reduced = false;
      if (parameter.slot.written && parameter.slot.stream) {  // added to below
        detail::wait_for(*parameter.slot.stream, detail::current_stream(device()));
      }
      (parameter.slot.written ? add_to : copy_to).push_back(slot);
      (parameter.slot.written ? add_from : copy_from).push_back(grad);
    } else if (!grad.defined() && !parameter.slot.written) {
      continue;
    } else if (!grad.defined()) {
      parameter.reduced = false;  // an op wrote the slot anew
    } else if (parameter.reduced) {
      refuse_partial(parameter);
    }
    grad = slot;
    parameter.slot.written = false;
    parameter.slot.stream = std::nullopt;
  }
  if (!copy_to.empty()) {
    at::_foreach_copy_(copy_to, copy_from);
  }
  if (!add_to.empty()) {
    at::_foreach_add_(add_to, add_from);
  }
}

}  // namespace ddp
