// SPDX-License-Identifier: Apache-2.0
#include "reduce/open_forwards.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

// torch::autograd::grad() runs the hooks of outputs but accumulates nothing.
bool backward_accumulates() {
  const auto* wanted_nodes = torch::autograd::get_current_graph_task_exec_info();
  return wanted_nodes == nullptr || wanted_nodes->empty();
}

// Leaves have none, and their hooks are never freed.
bool has_graph(const at::Tensor& output) {
  return output.defined() && output.requires_grad() && !output.is_leaf();
}

std::vector<bool> either(std::vector<bool> a, const std::vector<bool>& b) {
  std::transform(a.begin(), a.end(), b.begin(), a.begin(), std::logical_or<>());
  return a;
}

}  // namespace

OpenForwards::OpenForwards(const DdpOptions& options, const GradientHooks& hooks,
                           std::function<void()> on_reached)
    : walks_(options.find_unused_parameters && !options.static_graph),
      one_backward_only_(options.find_unused_parameters || options.static_graph),
      hooks_(hooks),
      on_reached_(std::make_shared<std::function<void()>>(std::move(on_reached))) {}

// Makes each output with a graph report when a backward reaches it. Returns false if no output has
// a graph. The hook, which the graph owns, holds the only shared_ptr to Forward, so the forward
// ends when the graph is freed.
bool OpenForwards::watch(const std::vector<at::Tensor>& outputs,
                         const std::shared_ptr<Forward>& forward) {
  bool watched = false;
  for (const auto& output : outputs) {
    if (!has_graph(output)) {
      continue;
    }
    watched = true;
    output.register_hook([forward, weak = std::weak_ptr(on_reached_)](const at::Tensor&) {
      const auto on_reached = weak.lock();
      forward->reached = true;
      if (on_reached == nullptr || !backward_accumulates()) {
        return;
      }
      if (forward->closed) {
        throw SettingsError(
            "this is the second backward of one forward, and ddp.find_unused_parameters=true "
            "allows one; fix: add the losses and call backward once, or set "
            "ddp.find_unused_parameters=false");
      }
      (*on_reached)();
    });
  }
  return watched;
}

bool OpenForwards::can_track(const std::vector<at::Tensor>& outputs) {
  return std::any_of(outputs.begin(), outputs.end(), has_graph);
}

void OpenForwards::add(const std::vector<at::Tensor>& outputs) {
  forward_since_backward_ = true;
  refuses_second_ = false;
  const auto forward = std::make_shared<Forward>();
  const bool watched = watch(outputs, forward);
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
    open_.push_back({forward, std::move(reachable)});
  } else {
    untracked_ = num_untracked_++ == 0 ? std::move(reachable) : either(untracked_, reachable);
  }
  update_reachable();
}

// Several forwards may share one backward.
void OpenForwards::update_reachable() {
  reachable_ = num_untracked_ > 0 ? untracked_ : open_.front().reachable;
  for (const auto& open : open_) {
    reachable_ = either(reachable_, open.reachable);
  }
}

void OpenForwards::forget_ended() {
  std::erase_if(open_, [](const Open& open) {
    const auto forward = open.forward.lock();
    return !forward || forward->reached;
  });
}

bool OpenForwards::has_unreached() {
  forget_ended();
  return !open_.empty();
}

void OpenForwards::close_reached() {
  for (const auto& open : open_) {
    if (const auto forward = open.forward.lock(); forward && forward->reached) {
      forward->closed = true;
    }
  }
}

// After forward, forward, backward, the second backward is synchronised too. In it .grad already
// holds mean1. The average of (mean1 + own2) over the ranks is mean1 + mean2, as wanted.
bool OpenForwards::expect_another_backward() {
  forward_since_backward_ = false;
  forget_ended();
  num_untracked_ = std::max(0, num_untracked_ - 1);
  if (open_.empty() && num_untracked_ == 0) {
    return false;
  }
  if (one_backward_only_) {  // unused parameters were decided for both forwards
    refuses_second_ = !open_.empty();
    open_.clear();
    num_untracked_ = 0;
    return false;
  }
  update_reachable();
  return true;
}

bool OpenForwards::note_local_forward() {
  refuses_second_ = false;
  forget_ended();
  return open_.empty() && (num_untracked_ == 0 || !forward_since_backward_);
}

void OpenForwards::check_not_second() const {
  if (refuses_second_) {
    throw SettingsError(
        "this is the second backward after two forwards: with ddp.find_unused_parameters=true or "
        "ddp.static_graph=true one backward must follow; fix: sum the losses, or set both to "
        "false");
  }
}

void OpenForwards::clear() {
  open_.clear();
  num_untracked_ = 0;
  forward_since_backward_ = false;
  refuses_second_ = false;
}

}  // namespace ddp::detail
