// SPDX-License-Identifier: Apache-2.0
#include "reduce/backward_pass.hpp"

#include <ATen/ATen.h>

#include <utility>

#include "core/launch/place_in_loop.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/trace_scope.hpp"
#include "ops/shared/autocast_off.hpp"
#include "ops/shared/timing_event.hpp"
#include "reduce/hooks/loss_scale.hpp"
#include "reduce/model/shared_parameters.hpp"
#include "reduce/sparse_gradients.hpp"

namespace ddp::detail {

using ops::detail::current_stream;
using ops::detail::is_capturing;
using ops::detail::wait_for;

namespace {

// A parameter that is frozen or unused now may have had a gradient under no_sync(), which
// zero_grad() dropped. Then the optimizer must skip the parameter. Call this before the bucket is
// gathered.
void forget_dropped_gradients(ReducerParts& parts, const Bucket& bucket) {
  for (const int index : bucket.parameters) {
    const at::Tensor& tensor = parts.gradients.parameters()[static_cast<size_t>(index)].tensor;
    const bool may_lack = !tensor.requires_grad() || parts.unused.reads_map();
    if (may_lack && !tensor.grad().defined() && !parts.gradients.slot(index).written) {
      parts.unused.forget_used(index);
    }
  }
}

// A fused op may have written the slot on a side stream, and .grad may lie in the slot. Then an
// addition by AccumulateGrad must follow the op's.
void wait_for_writer(const ReducerParts& parts, int index) {
  const auto& slot = parts.gradients.slot(index);
  if (slot.written && slot.stream) {
    wait_for(*slot.stream, current_stream(parts.communicator->device()));
  }
}

// If the outputs are not known, a backward of another model that shares a parameter looks like the
// one that this forward expects.
void check_shared_parameters(const ReducerParts& parts, const std::vector<at::Tensor>& outputs) {
  if (OpenForwards::can_track(outputs)) {
    return;
  }
  const auto& parameters = parts.gradients.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (is_shared(parts.gradients, static_cast<int>(i))) {
      throw SettingsError(concat(
          "parameter ", parts.parameter_name(static_cast<int>(i)),
          " belongs to several wrapped models, and this forward has no outputs with a graph that "
          "tell whose backward runs; fix: return a tensor that requires a gradient from forward, "
          "or call prepare_for_backward({loss})"));
    }
  }
}

void check_gradient(const ReducerParts& parts, int index) {
  if (at::GradMode::is_enabled()) {
    throw SettingsError("backward(create_graph=true) reached parameter " +
                        parts.parameter_name(index) +
                        ": gradients of gradients are not reduced; fix: use torch::autograd::grad");
  }
  check_layout(parts, index);
}

}  // namespace

BackwardPass::BackwardPass(ReducerParts& parts)
    : parts_(parts),
      model_id_(parts.communicator->launch_sequencer().register_model()),
      pass_(parts.layout()),
      hooks_(
          parts.gradients.parameters(), [this](int index) { on_gradient(index); },
          [this](int index) { before_addition(index); }),
      forwards_(parts.options, hooks_, [this](auto reached) { on_forward_reached(reached); }),
      expected_fires_(parts.gradients.parameters().size(), 1) {}

BackwardPass::~BackwardPass() {
  sequencer().end_pass(model_id_);
}

std::string BackwardPass::why_incomplete() {
  const std::lock_guard lock(mutex_);
  const auto& scheduler = pass_.scheduler;
  if (!pass_.is_expected || scheduler.num_ready() == 0 || scheduler.all_ready()) {
    return "";
  }
  const auto& parameters = parts_.gradients.parameters();
  std::string missing;
  int count = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!scheduler.is_ready(static_cast<int>(i)) && ++count <= 10) {
      missing += (count > 1 ? ", " : "") + parameters[i].name;
    }
  }
  return concat(
      "the previous backward", parts_.of_model(), " left ", count, " of ", parameters.size(),
      " parameters without a gradient: ", missing, count > 10 ? ", …" : "",
      parts_.options.static_graph
          ? "; the graph changed although ddp.static_graph=true; fix: set it to false"
          : "; fix: set ddp.find_unused_parameters=true, or use all outputs of the model in the "
            "loss. A loss that uses outputs and still skips parameters, as a gradient penalty "
            "does, needs \"+ 0 * output.sum()\"");
}

void BackwardPass::start() {
  parts_.reductions.begin_pass();
  parts_.gradients.forget_writes();
  pass_ = Pass(parts_.layout());
  pass_.is_expected = true;
  pass_.counts_fires = parts_.options.static_graph && history_.num_passes == 0;
  sequencer().begin_pass(
      model_id_, static_cast<int>(parts_.layout().buckets.size()),
      [this](int bucket) { launch(bucket); }, [this] { finish(); });
}

void BackwardPass::follow_layout() {
  const std::lock_guard lock(mutex_);
  if (pass_.is_expected) {
    start();
  }
}

void BackwardPass::expect(const std::vector<at::Tensor>& outputs) {
  hooks_.check_attached();
  const std::lock_guard lock(mutex_);
  if (parts_.unused.reads_map() && is_capturing(parts_.communicator->device())) {
    throw SettingsError(
        "ddp.find_unused_parameters=true reads a map on the host in every step and cannot be "
        "captured in a CUDA graph; fix: set it to false, or set ddp.static_graph=true and capture "
        "after the first step");
  }
  refuse_uses_of_sparse(parts_);
  check_shared_parameters(parts_, outputs);
  running_pass_.forget_thrown();
  forget_thrown_local();
  forwards_.add(outputs);
  start();
  if (!OpenForwards::can_track(outputs)) {
    parts_.mean.begin_backward();
  }
  parts_.timing.begin_backward();
  parts_.tuner.begin_backward(history_.num_passes, history_.ready_order);
}

void BackwardPass::record_local_forward(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard lock(mutex_);
  parts_.gradients.forget_writes();
  forget_thrown_local();
  forwards_.add_local(outputs);
  if (!OpenForwards::can_track(outputs)) {
    parts_.mean.begin_backward();
  }
}

void BackwardPass::forget_thrown_local() {
  running_local_.forget_thrown();
  is_repeated_ = is_repeated_ && !running_local_.empty();
}

void BackwardPass::on_forward_reached(Backward reached) {
  const std::lock_guard lock(mutex_);
  if (reached != Backward::Synchronised) {
    is_repeated_ = is_repeated_ || reached == Backward::Repeated;
    record_local_backward();
  } else if (pass_.is_expected) {
    record_backward();
  }
}

// Runs before AccumulateGrad adds a gradient to .grad.
void BackwardPass::before_addition(int index) {
  const std::lock_guard lock(mutex_);
  wait_for_writer(parts_, index);
  switch (action_of(index)) {
    case GradientAction::Reduce:
      record_backward();
      break;
    case GradientAction::AccumulateAndWarn:
      warn_of_unannounced(index);
      [[fallthrough]];
    case GradientAction::Accumulate:
      record_local_backward();
      break;
    case GradientAction::LeaveToOther:
      break;
  }
}

void BackwardPass::on_gradient(int index) {
  const std::lock_guard lock(mutex_);
  check_gradient(parts_, index);
  parts_.gradients.refuse_partial(index);
  const auto action = action_of(index);
  const bool is_reduced = action == GradientAction::Reduce;
  const bool is_own = action != GradientAction::LeaveToOther;
  if (!is_own) {
    parts_.mean.check_gradient();
    if (!forwards_.last_is_local()) {
      return;
    }
  }
  const at::Tensor& parameter = parts_.gradients.parameters()[static_cast<size_t>(index)].tensor;
  if (parameter.requires_grad()) {  // else it was frozen after the forward and got nothing
    parts_.unused.mark_used(index);
    if (is_own) {
      parts_.mean.record_gradient(is_reduced);
    }
  }
  if (!is_own) {
    return;
  }
  parts_.timing.record_gradient();
  record_phase("backward");
  if (!is_reduced) {
    if (action == GradientAction::AccumulateAndWarn) {
      warn_of_unannounced(index);
    }
    local_gradients_.push_back(index);
    record_local_gradient(parts_.gradients, index);
    record_local_backward();
    return;
  }
  parts_.gradients.keep_apart(index);
  record_backward();
  if (parts_.options.static_graph) {
    count_static_gradient(index);
    return;
  }
  mark_unused_parameters();
  mark_ready(index);
}

GradientAction BackwardPass::action_of(int index) const {
  return action_for(forwards_.kind(pass_.is_expected), running_backward(index));
}

// A nested backward (checkpointing) has a graph of its own, and runs within one that was noted.
Backward BackwardPass::running_backward(int index) const {
  if (pass_.is_expected && (!running_pass_.empty() || forwards_.in_running_backward())) {
    return Backward::Synchronised;
  }
  if (!running_local_.empty() || forwards_.local_in_running_backward()) {
    return is_repeated_ ? Backward::Repeated : Backward::Local;
  }
  if (is_shared(parts_.gradients, index)) {
    return Backward::Shared;
  }
  return any_is_shared(parts_.gradients) ? Backward::UnknownSharing : Backward::Unknown;
}

void BackwardPass::warn_of_unannounced(int index) {
  if (parts_.communicator->world_size() == 1 || std::exchange(has_warned_unannounced_, true)) {
    return;
  }
  log_warning(concat(
      "parameter ", parts_.parameter_name(index),
      " got a gradient, but no forward of the wrapper waits for a backward: the gradient is not "
      "averaged and the replicas diverge; fix: call model.forward(x) instead of "
      "module->forward(x), or model.prepare_for_backward({loss}) before the backward, and one "
      "backward for each forward"));
}

// Called with the lock held, in a backward that is not reduced. Its gradients move into their slots
// when it ends: those of a nested one early.
void BackwardPass::record_local_backward() {
  const auto at_end = [this] {
    ++history_.num_local_passes;
    is_repeated_ = false;
    parts_.timing.end_backward();
    parts_.gradients.gather_local(std::exchange(local_gradients_, {}));
  };
  if (running_local_.add(at_end)) {
    parts_.mean.begin_backward();
  }
}

void BackwardPass::count_static_gradient(int index) {
  int& fires = pass_.fires[static_cast<size_t>(index)];
  const int expected = expected_fires_[static_cast<size_t>(index)];
  ++fires;
  if (pass_.counts_fires) {
    if (fires == 1) {
      pass_.ready_order.push_back(index);
    }
    return;
  }
  if (fires > expected) {
    throw MismatchError(concat(
        "parameter ", parts_.parameter_name(index), " got its gradient ", fires,
        " times in this backward and ", expected,
        " times in the first one: the graph changed although ddp.static_graph=true; fix: set it "
        "to false"));
  }
  mark_unused_parameters();
  if (fires == expected) {
    mark_ready(index);
  }
}

void BackwardPass::end_static_count() {
  const std::lock_guard lock(mutex_);
  const auto order = std::exchange(pass_.ready_order, {});
  expected_fires_ = pass_.fires;
  mark_unused_parameters();
  for (const int index : order) {
    mark_ready(index);
  }
}

// Marks parameters without a gradient in this pass as ready at its first hook, so that their
// buckets fill. They contribute zeros.
void BackwardPass::mark_unused_parameters() {
  if (std::exchange(pass_.has_marked_unused, true)) {
    return;
  }
  const auto reachable = forwards_.reachable();
  for (size_t i = 0; i < expected_fires_.size(); ++i) {
    if (parts_.options.static_graph ? expected_fires_[i] == 0
                                    : !reachable.empty() && !reachable[i]) {
      mark_ready(static_cast<int>(i));
    }
  }
}

void BackwardPass::mark_ready(int index) {
  using Mark = BucketScheduler::Mark;
  const auto mark = pass_.scheduler.mark_ready(index);
  if (mark == Mark::Twice) {
    throw MismatchError(concat(
        "parameter ", parts_.parameter_name(index),
        " got its gradient twice before the others had theirs; fix: if several backwards follow "
        "one forward, sum their losses and call backward once; if a block is computed again "
        "(re-entrant checkpointing) in every step, set ddp.static_graph=true"));
  }
  pass_.ready_order.push_back(index);
  const int bucket = parts_.layout().places[static_cast<size_t>(index)].bucket;
  parts_.reductions.record_gradient(bucket, parts_.gradients.slot(index));
  parts_.tuner.record_ready(index, mark == Mark::AllReady);
  if (mark == Mark::Pending) {
    return;
  }
  parts_.reductions.wait_for_gradients(bucket);
  forget_dropped_gradients(parts_, parts_.layout().buckets[static_cast<size_t>(bucket)]);
  parts_.gradients.gather(bucket, parts_.unused.used());
  if (mark == Mark::AllReady) {
    parts_.timing.record_last_gradient();
    // Queues the final callback now that all gradients are ready. If it were queued earlier, a
    // nested backward could run it too soon.
    queue_engine_callback([group = parts_.communicator] { group->launch_sequencer().flush(); });
  }
  sequencer().bucket_ready(model_id_, bucket);
}

// LaunchSequencer calls this in the same order on all ranks, possibly in another model's hook.
// Buckets of one group start together when the last of them is ready.
void BackwardPass::launch(int index) {
  const auto& buckets = parts_.layout().buckets;
  const auto last = static_cast<size_t>(index);
  const int number = buckets[last].launch;
  if (last + 1 < buckets.size() && buckets[last + 1].launch == number) {
    return;
  }
  size_t first = last;
  while (first > 0 && buckets[first - 1].launch == number) {
    --first;
  }
  if (first == 0) {
    parts_.timing.record_first_reduction();
  }
  parts_.reductions.start(first, last);
  if (last + 1 == buckets.size() && !parts_.reductions.are_rehearsed()) {
    parts_.unused.start_map();
  }
}

// Runs on the engine when the whole backward is over, with the caller's streams current.
void BackwardPass::finish() {
  const at::NoGradGuard no_grad;
  const ops::AutocastOff autocast_off(parts_.communicator->device().type());
  const std::lock_guard lock(mutex_);
  parts_.timing.end_backward();
  const TraceScope trace("wait for reductions", "compute");
  parts_.timing.begin_wait();
  parts_.buffers.finish();
  const auto used = finish_reductions(parts_);
  parts_.gradients.add_set_aside();
  parts_.timing.end_wait();
  parts_.gradients.publish(used);
  record_phase("code after backward");
  parts_.unused.end_pass(history_.num_passes == 0);
  parts_.tuner.end_backward();
  parts_.timing.end_pass();
  parts_.mean.reset();
  history_.ready_order = pass_.ready_order;
  ++history_.num_passes;
  pass_.is_expected = false;
  if (forwards_.expect_another_backward(parts_.mean.in_join())) {
    start();
  }
}

void BackwardPass::run_with_zeros() {
  {
    const std::lock_guard lock(mutex_);
    start();
    parts_.unused.forget_used();
    for (int i = 0; i < static_cast<int>(expected_fires_.size()); ++i) {
      pass_.scheduler.mark_ready(i);
      pass_.ready_order.push_back(i);
    }
    for (int b = 0; b < static_cast<int>(parts_.layout().buckets.size()); ++b) {
      parts_.gradients.bucket(b).buffer.zero_();
      sequencer().bucket_ready(model_id_, b);
    }
  }
  sequencer().flush();
}

// Called with the lock held, in a backward of the expected pass. A nested backward (checkpointing)
// is a separate task. With static_graph, the first backward counts hook calls per parameter, and
// the count ends with the outermost task.
void BackwardPass::record_backward() {
  if (!running_pass_.add([this] { end_backward(); })) {
    return;
  }
  parts_.mean.begin_backward();
  parts_.reductions.set_loss_scale(running_loss_scale());
  if (pass_.counts_fires && !std::exchange(pass_.has_queued_count, true)) {
    queue_engine_callback([this] { end_static_count(); });
  }
}

// The loss may not use an output. A parameter that only such outputs reach got no gradient in this
// backward and counts as unused.
void BackwardPass::end_backward() {
  const bool finds_unused = parts_.options.find_unused_parameters && !parts_.options.static_graph;
  if (!finds_unused || !pass_.is_expected || !running_pass_.empty() ||
      pass_.scheduler.all_ready()) {
    return;
  }
  forwards_.close_reached();
  for (int i = 0; i < static_cast<int>(expected_fires_.size()); ++i) {
    if (!pass_.scheduler.is_ready(i)) {
      mark_ready(i);
    }
  }
}

bool BackwardPass::threw() {
  const std::lock_guard lock(mutex_);
  // All gradients were ready, but finish() did not run.
  const bool lacks_end = pass_.scheduler.num_ready() > 0 && pass_.scheduler.all_ready();
  return pass_.is_expected && (lacks_end || !running_pass_.empty());
}

void BackwardPass::complete() {
  {
    const std::lock_guard lock(mutex_);
    for (int i = 0; i < static_cast<int>(expected_fires_.size()); ++i) {
      if (!pass_.scheduler.is_ready(i) &&
          pass_.scheduler.mark_ready(i) != BucketScheduler::Mark::Pending) {
        sequencer().bucket_ready(model_id_, parts_.layout().places[static_cast<size_t>(i)].bucket);
      }
    }
  }
  sequencer().flush();
  if (const auto& hook = parts_.reductions.hook()) {
    hook->reset();  // its state between buckets belongs to the dropped gradients
  }
}

void BackwardPass::restore(const History& history) {
  const std::lock_guard lock(mutex_);
  sequencer().end_pass(model_id_);
  parts_.reductions.abandon();
  parts_.unused.abandon_map();
  parts_.timing.abandon();
  parts_.tuner.end_backward();
  forwards_.clear();
  pass_ = Pass(parts_.layout());
  history_ = history;
  running_pass_.clear();
  running_local_.clear();
  local_gradients_.clear();
  is_repeated_ = false;
}

}  // namespace ddp::detail
