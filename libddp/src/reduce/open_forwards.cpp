// SPDX-License-Identifier: Apache-2.0
// Which forwards still wait for their backward. Usually one forward is followed by one backward;
// others are two forwards with one backward of both, two forwards with a backward each, and
// forwards that get none (a skipped step, a logged loss).
#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "reduce/reducer_impl.hpp"

namespace ddp {

// Every output of the forward that has a graph tells when a backward reaches it. The flag lives in
// the graph: where it is gone, so is the forward.
void Reducer::Impl::open_forward(const std::vector<at::Tensor>& outputs) {
  forward_since_pass = true;
  refuses_second = false;
  const auto state = std::make_shared<ForwardState>();
  bool tracked = false;
  bool has_leaf = false;
  for (const auto& output : outputs) {
    if (!output.defined() || !output.requires_grad()) {
      continue;
    }
    // Hooks of a leaf outlive every graph.
    has_leaf = has_leaf || output.is_leaf();
    if (!output.is_leaf()) {
      output.register_hook([this, state, alive = std::weak_ptr(lifetime)](const at::Tensor&) {
        if (!alive.expired()) {
          reach_output(*state);
        }
      });
      tracked = true;
    }
  }
  const bool walks = options.find_unused_parameters && !options.static_graph;
  if (walks && !tracked) {
    throw SettingsError(detail::concat(
        "ddp.find_unused_parameters=true needs the outputs that the backward starts from, and ",
        has_leaf ? "forward returned only parameters themselves, which have no graph: return what "
                   "the module computes from them"
                 : "none of them requires a gradient: return them from forward",
        ", or call prepare_for_backward({loss})"));
  }
  forget_ended_forwards();
  if (tracked) {
    open_forwards.push_back(
        {state, walks ? find_reachable(outputs) : std::vector<bool>(parameters.size(), true)});
  } else {
    ++untracked_forwards;
  }
  if (walks) {
    // One backward may be of several forwards.
    reachable.assign(parameters.size(), false);
    for (const auto& forward : open_forwards) {
      std::transform(reachable.begin(), reachable.end(), forward.reachable.begin(),
                     reachable.begin(), std::logical_or<>());
    }
  }
}

void Reducer::Impl::forget_ended_forwards() {
  std::erase_if(open_forwards, [](const OpenForward& forward) {
    const auto state = forward.state.lock();
    return !state || state->reached;
  });
}

void Reducer::Impl::reach_output(ForwardState& state) {
  state.reached = true;
  const auto* wanted_nodes = torch::autograd::get_current_graph_task_exec_info();
  if (wanted_nodes != nullptr && !wanted_nodes->empty()) {
    return;  // torch::autograd::grad accumulates nothing
  }
  const std::lock_guard lock(mutex);
  if (state.closed) {
    throw SettingsError(
        "this is the second backward of one forward: with ddp.find_unused_parameters=true the "
        "first backward ends the reduction, and what it did not reach counts as unused; sum the "
        "losses, or set ddp.find_unused_parameters=false");
  }
  if (expects_sync) {
    note_backward();
  }
}

// Forward, forward, backward, backward: the second backward is synchronised too. What it adds to
// .grad is this rank's own gradient, and the mean of (mean + own) is the sum of the two means.
void Reducer::Impl::end_forwards_of_pass() {
  forward_since_pass = false;
  forget_ended_forwards();
  untracked_forwards = std::max(0, untracked_forwards - 1);
  if (open_forwards.empty() && untracked_forwards == 0) {
    return;
  }
  if (options.find_unused_parameters || options.static_graph) {
    // Their passes end with one backward: what is unused in it was decided for both forwards.
    refuses_second = !open_forwards.empty();
    open_forwards.clear();
    untracked_forwards = 0;
  } else {
    begin_pass();
  }
}

// A forward inside no_sync: its backward is local. A pass that nothing will complete, because its
// forward is gone without a backward, must not take it.
void Reducer::Impl::note_local_forward() {
  local_forward = true;
  forget_writes();
  refuses_second = false;
  forget_ended_forwards();
  const bool abandoned = open_forwards.empty() && (untracked_forwards == 0 || !forward_since_pass);
  if (expects_sync && scheduler.num_ready() == 0 && abandoned) {
    expects_sync = false;
    forward_since_pass = false;
    untracked_forwards = 0;
    communicator->launch_sequencer().end_pass(model_id);
  }
}

void Reducer::Impl::refuse_second_backward() const {
  if (refuses_second) {
    throw SettingsError(
        "this is the second backward after two forwards: with ddp.find_unused_parameters=true or "
        "ddp.static_graph=true one backward has to follow; sum the losses, or set both to false");
  }
}

}  // namespace ddp
