// SPDX-License-Identifier: Apache-2.0
#include "reduce/open_forwards.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

// torch::autograd::grad() runs the hooks of outputs, but it captures gradients and accumulates
// nothing.
bool backward_accumulates() {
  const auto* wanted_nodes = torch::autograd::get_current_graph_task_exec_info();
  return wanted_nodes == nullptr ||
         std::none_of(wanted_nodes->begin(), wanted_nodes->end(),
                      [](const auto& wanted) { return wanted.second.captures_ != nullptr; });
}

// Leaves have none, and their hooks are never freed.
bool has_graph(const at::Tensor& output) {
  return output.defined() && output.requires_grad() && !output.is_leaf();
}

std::vector<WeakNodePointer> nodes_of(const std::vector<at::Tensor>& outputs) {
  std::vector<WeakNodePointer> nodes;
  for (const auto& output : outputs) {
    if (has_graph(output)) {
      nodes.emplace_back(output.grad_fn());
    }
  }
  return nodes;
}

std::vector<bool> either(std::vector<bool> a, const std::vector<bool>& b) {
  std::transform(a.begin(), a.end(), b.begin(), a.begin(), std::logical_or<>());
  return a;
}

// Runs `call` whenever a backward that accumulates gradients reaches one of `outputs`. Their graph
// owns it.
void call_when_reached(const std::vector<at::Tensor>& outputs, const std::function<void()>& call) {
  for (const auto& output : outputs) {
    if (has_graph(output)) {
      output.register_hook([call](const at::Tensor&) {
        if (backward_accumulates()) {
          call();
        }
      });
    }
  }
}

}  // namespace

OpenForwards::OpenForwards(const DdpOptions& options, const GradientHooks& hooks,
                           std::function<void(Backward)> on_reached)
    : walks_(options.find_unused_parameters && !options.static_graph),
      one_backward_only_(options.find_unused_parameters || options.static_graph),
      hooks_(hooks),
      on_reached_(std::make_shared<std::function<void(Backward)>>(std::move(on_reached))) {}

bool OpenForwards::can_track(const std::vector<at::Tensor>& outputs) {
  return std::any_of(outputs.begin(), outputs.end(), has_graph);
}

// The hooks, which the graph owns, hold the only shared_ptr to Forward, so the forward ends when
// the graph is freed.
void OpenForwards::watch(const std::vector<at::Tensor>& outputs,
                         const std::shared_ptr<Forward>& forward) {
  call_when_reached(outputs, [forward, weak = std::weak_ptr(on_reached_)] {
    auto before = State::Waiting;
    forward->state.compare_exchange_strong(before, State::Reached);
    const auto on_reached = weak.lock();
    if (on_reached == nullptr) {
      return;
    }
    if (before == State::Closed) {
      throw SettingsError(
          "this is the second backward after a forward or after several: with "
          "ddp.find_unused_parameters=true or ddp.static_graph=true, and inside a join, one "
          "backward must follow; fix: sum the losses and call backward once (means over different "
          "counts: docs/recipes/uneven_data.md), or set both to false and use no join");
    }
    const auto synchronised = before == State::Ended ? Backward::Repeated : Backward::Synchronised;
    (*on_reached)(forward->is_local ? Backward::Local : synchronised);
  });
}

bool OpenForwards::Open::is_reached() const {
  const auto known = forward.lock();
  return known != nullptr && known->state == State::Reached;
}

// A parameter may get its gradient before the backward reaches an output: from a tensor that the
// module keeps for the loss. So the whole graph of the backward is asked.
bool OpenForwards::Open::is_in_running_graph() const {
  const auto* graph = torch::autograd::get_current_graph_task_nodes_in_graph();
  return graph != nullptr && std::any_of(nodes.begin(), nodes.end(), [&](const auto& weak) {
           const auto node = weak.lock();
           return node != nullptr && graph->contains(node.get());
         });
}

bool OpenForwards::in_running_backward() const {
  return std::any_of(open_.begin(), open_.end(),
                     [](const Open& open) { return open.is_in_running_graph(); });
}

bool OpenForwards::local_in_running_backward() const {
  return std::any_of(local_.begin(), local_.end(),
                     [](const Open& open) { return open.is_in_running_graph(); });
}

// A backward that reaches no known output (of a tensor that the module keeps, of a penalty on
// gradients) is reduced as in PyTorch, if the last forward was synchronised. If only one backward
// is allowed, it is not: it may be a nested one, which runs before the forward's own backward.
Forwards OpenForwards::kind(bool waits) const {
  if (waits && num_untracked_ > 0) {
    return Forwards::Untracked;
  }
  if (last_is_local_) {
    return forward_since_backward_ ? Forwards::Neither : Forwards::Local;
  }
  return waits && forward_since_backward_ && !one_backward_only_ ? Forwards::Synchronised
                                                                 : Forwards::Neither;
}

void OpenForwards::add(const std::vector<at::Tensor>& outputs) {
  forward_since_backward_ = true;
  const auto forward = std::make_shared<Forward>();
  watch(outputs, forward);
  const bool watched = can_track(outputs);
  if (walks_ && !watched) {
    const bool has_leaf = std::any_of(outputs.begin(), outputs.end(), [](const at::Tensor& output) {
      return output.defined() && output.requires_grad() && output.is_leaf();
    });
    throw SettingsError(concat(
        "ddp.find_unused_parameters=true needs the outputs that the backward starts from: ",
        has_leaf ? "forward returned only parameters, which have no graph; fix: return what the "
                   "module computes from them"
                 : "forward returned no tensor that requires a gradient; fix: return one",
        ", or call prepare_for_backward({loss})"));
  }
  forget_ended();
  auto reachable = walks_ ? hooks_.find_reachable(outputs) : hooks_.find_trained();
  if (watched) {
    open_.push_back({forward, nodes_of(outputs), std::move(reachable)});
  } else {
    untracked_ = num_untracked_++ == 0 ? std::move(reachable) : either(untracked_, reachable);
  }
  last_is_local_ = false;
}

// Several forwards may share one backward, and others have none.
std::vector<bool> OpenForwards::reachable() const {
  const auto runs = [](const Open& open) {
    return open.is_reached() || open.is_in_running_graph();
  };
  const bool is_known = num_untracked_ > 0 || std::any_of(open_.begin(), open_.end(), runs);
  auto reachable = num_untracked_ > 0 ? untracked_ : std::vector<bool>();
  for (const auto& open : open_) {
    if (!is_known || runs(open)) {
      reachable = reachable.empty() ? open.reachable : either(reachable, open.reachable);
    }
  }
  return reachable;
}

// Whether the graph of an older forward still exists may differ between ranks. So a second backward
// of a forward is local on all of them, even where another forward keeps the pass open.
void OpenForwards::forget_ended() {
  std::erase_if(open_, [](const Open& open) {
    const auto forward = open.forward.lock();
    if (forward == nullptr) {
      return true;
    }
    auto before = State::Reached;
    forward->state.compare_exchange_strong(before, State::Ended);
    return before != State::Waiting;
  });
}

bool OpenForwards::has_unreached() {
  forget_ended();
  return !open_.empty();
}

void OpenForwards::close_reached() {
  change_state(State::Reached, State::Closed);
}

void OpenForwards::change_state(State from, State to) {
  for (const auto& open : open_) {
    if (const auto forward = open.forward.lock()) {
      auto expected = from;
      forward->state.compare_exchange_strong(expected, to);
    }
  }
}

// After two forwards and one backward, the second backward is synchronised too. Before it, .grad is
// the mean of the first one on all ranks. So the average over the ranks is the sum of both means.
bool OpenForwards::expect_another_backward(bool in_join) {
  forward_since_backward_ = false;
  num_untracked_ = std::max(0, num_untracked_ - 1);
  if (!has_unreached() && num_untracked_ == 0) {
    return false;
  }
  // Unused parameters were decided for both forwards, or ranks without input answered once.
  if (one_backward_only_ || in_join) {
    change_state(State::Waiting, State::Closed);
    open_.clear();
    num_untracked_ = 0;
    return false;
  }
  return true;
}

void OpenForwards::add_local(const std::vector<at::Tensor>& outputs) {
  const auto forward = std::make_shared<Forward>();
  forward->is_local = true;
  last_is_local_ = true;
  watch(outputs, forward);
  std::erase_if(local_, [](const Open& open) { return open.forward.expired(); });
  local_.push_back({forward, nodes_of(outputs), {}});
  if (!forward_since_backward_) {
    num_untracked_ = 0;  // the last backward was that of all of them
  }
}

void OpenForwards::clear() {
  open_.clear();
  local_.clear();
  num_untracked_ = 0;
  forward_since_backward_ = false;
}

}  // namespace ddp::detail
