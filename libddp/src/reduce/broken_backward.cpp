// SPDX-License-Identifier: Apache-2.0
// The end of a backward, reached or not. The autograd engine runs the callbacks of a backward only
// where no exception ended it, so a callback that never ran is the sign of an exception.
//
// After an exception this rank has launched some buckets of the pass. Another rank may have
// launched more of them. Before the next forward every rank launches the rest and waits for all, so
// that the ranks stay at the same collective. The means are of no use and are dropped.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "ddp/core/control_plane.hpp"
#include "reduce/reducer_host_state.hpp"
#include "reduce/reducer_impl.hpp"
#include "reduce/replica_sync.hpp"

namespace ddp {

struct Reducer::OwnGradients {
  struct Parameter {
    at::Tensor grad;  // a clone where it lies in a bucket
    at::Tensor set_aside;
    bool in_bucket = false;
    bool reduced = false;
    bool used = false;
  };
  std::vector<Parameter> parameters;
  Counts counts;
};

// Called in a backward of the expected pass, with the lock held. A nested backward (checkpointing)
// is a task of its own.
void Reducer::Impl::note_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (std::find(running_backwards.begin(), running_backwards.end(), task) !=
      running_backwards.end()) {
    return;
  }
  running_backwards.push_back(task);
  torch::autograd::Engine::get_default_engine().queue_callback(
      [this, task, alive = std::weak_ptr(lifetime)] {
        if (alive.expired()) {
          return;
        }
        const std::lock_guard lock(mutex);
        std::erase(running_backwards, task);
        end_backward();
      });
}

// An output may take no part in the loss. What only such outputs reach got no gradient in this
// backward and counts as unused.
void Reducer::Impl::end_backward() {
  const bool finds_unused = options.find_unused_parameters && !options.static_graph;
  if (!finds_unused || !expects_sync || !running_backwards.empty() || scheduler.all_ready()) {
    return;
  }
  for (const auto& forward : open_forwards) {
    if (const auto state = forward.state.lock(); state && state->reached) {
      state->closed = true;
    }
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!scheduler.is_ready(static_cast<int>(i))) {
      mark_ready(static_cast<int>(i));
    }
  }
}

bool Reducer::Impl::backward_threw() const {
  // All gradients were ready, but the end of the pass did not run.
  const bool lacks_end = scheduler.num_ready() > 0 && scheduler.all_ready();
  return expects_sync && (lacks_end || !running_backwards.empty());
}

// Over the control plane: the other ranks may wait in a collective of this pass or of the next one.
void Reducer::Impl::require_all_threw() const {
  const auto plane = communicator->control_plane();
  const std::string mine = detail::concat("the backward after ", num_passes, " others threw");
  const auto all =
      plane != nullptr ? plane->all_gather(mine) : detail::all_gather_text(*communicator, mine);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] != mine) {
      throw MismatchError(detail::concat(
          "rank ", communicator->rank(), " caught an exception of backward ", num_passes + 1,
          " and went on, but rank ", rank,
          " did not: the replicas have parted. Let such an exception end the program, or catch it "
          "on all ranks"));
    }
  }
}

// Launches the buckets that the exception left, and ends the pass.
void Reducer::Impl::complete_pass() {
  {
    const std::lock_guard lock(mutex);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const int index = static_cast<int>(i);
      if (!scheduler.is_ready(index) &&
          scheduler.mark_ready(index) != detail::BucketScheduler::Mark::Pending) {
        communicator->launch_sequencer().bucket_ready(model_id, layout.places[i].bucket);
      }
    }
  }
  communicator->launch_sequencer().flush();
  const std::lock_guard lock(mutex);
  if (hook) {
    hook->reset();  // what it keeps from bucket to bucket is of the dropped gradients
  }
}

void Reducer::Impl::drop_gradients() {
  const std::lock_guard lock(mutex);
  for (auto& parameter : parameters) {
    parameter.tensor.mutable_grad() = at::Tensor();
    parameter.set_aside = at::Tensor();
    parameter.used = parameter.reduced = false;
  }
  forget_writes();
  weight = 0;
  device_weight = at::Tensor();
  is_weighted = false;
}

void Reducer::join_broken_backward() {
  {
    const std::lock_guard lock(impl_->mutex);
    if (!impl_->backward_threw()) {
      return;
    }
  }
  const bool asks_first = impl_->communicator->control_plane() != nullptr;
  const auto before = host_state();
  if (asks_first) {
    impl_->require_all_threw();
  }
  impl_->complete_pass();
  restore(*before);
  impl_->drop_gradients();
  if (!asks_first) {
    impl_->require_all_threw();  // by a collective, which has to stand behind those of the pass
  }
}

std::shared_ptr<const Reducer::OwnGradients> Reducer::set_gradients_aside() {
  const at::NoGradGuard no_grad;
  auto own = std::make_shared<OwnGradients>();
  own->counts = counts();
  const std::lock_guard lock(impl_->mutex);
  for (auto& parameter : impl_->parameters) {
    at::Tensor& grad = parameter.tensor.mutable_grad();
    const bool in_bucket = grad.defined() && grad.is_alias_of(parameter.slot.memory);
    own->parameters.push_back({.grad = in_bucket ? grad.clone() : grad,
                               .set_aside = std::exchange(parameter.set_aside, {}),
                               .in_bucket = in_bucket,
                               .reduced = parameter.reduced,
                               .used = parameter.used});
    grad = at::Tensor();
    parameter.reduced = false;
  }
  impl_->weight = 0;
  impl_->device_weight = at::Tensor();
  impl_->is_weighted = false;
  return own;
}

void Reducer::restore_gradients(const OwnGradients& own) {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(impl_->mutex);
  for (size_t i = 0; i < impl_->parameters.size(); ++i) {
    auto& parameter = impl_->parameters[i];
    const auto& kept = own.parameters[i];
    if (kept.in_bucket) {
      parameter.slot.memory.copy_(kept.grad);
    }
    parameter.tensor.mutable_grad() = kept.in_bucket ? parameter.slot.memory : kept.grad;
    parameter.set_aside = kept.set_aside;
    parameter.reduced = kept.reduced;
    parameter.used = kept.used;
  }
  impl_->weight = own.counts.host;
  impl_->device_weight = own.counts.device;
  impl_->is_weighted = own.counts.is_weighted;
}

}  // namespace ddp
