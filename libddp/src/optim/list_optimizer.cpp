// SPDX-License-Identifier: Apache-2.0
#include "optim/list_optimizer.hpp"

#include <ATen/Functions.h>

#include <algorithm>

#include "core/log/trace_recorder.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/trace_scope.hpp"
#include "optim/capture.hpp"
#include "optim/state_check.hpp"
#include "optim/step_checks.hpp"

namespace ddp::detail {
namespace {

// The gradients times `factor`. The fused kernels index raw memory and require one dtype and equal
// strides; with a factor of their own they would overwrite `.grad`. So one foreach copy takes those
// that differ, and with a factor all.
std::vector<at::Tensor> gradients_like(const std::vector<at::Tensor>& params,
                                       std::vector<at::Tensor> grads,
                                       const std::optional<at::Tensor>& factor) {
  std::vector<at::Tensor> copies;
  std::vector<at::Tensor> originals;
  for (size_t i = 0; i < params.size(); ++i) {
    if (factor || grads[i].scalar_type() != params[i].scalar_type() ||
        !same_memory_layout(grads[i], params[i])) {
      originals.push_back(grads[i]);
      grads[i] = copies.emplace_back(at::empty_like(params[i]));
    } else if (grads[i].strides() != params[i].strides()) {
      grads[i] = grads[i].as_strided(params[i].sizes(), params[i].strides());
    }
  }
  if (!copies.empty()) {
    at::_foreach_copy_(copies, originals);
  }
  if (factor) {
    at::_foreach_mul_(copies, *factor);
  }
  return grads;
}

}  // namespace

ListOptimizer::ListOptimizer(const std::vector<ParameterSettings>& parameters,
                             const OptimizerOptions& options, Listeners* exact_syncs)
    : rule_(make_update_rule(options)) {
  for (const ParameterSettings& settings : parameters) {
    add_member(settings);
  }
  for (Chunk& chunk : chunks_) {
    chunk.steps = at::zeros({static_cast<int64_t>(chunk.members.size())},
                            at::TensorOptions().dtype(at::kFloat).device(chunk.device));
    for (size_t i = 0; i < chunk.members.size(); ++i) {
      chunk.members[i].step = chunk.steps.select(0, static_cast<int64_t>(i));
    }
  }
  if (exact_syncs != nullptr) {
    on_exact_sync_ = exact_syncs->add([this] { restart_masters(); });
  }
}

void ListOptimizer::restart_masters() {
  for (const Chunk& chunk : chunks_) {
    for (const ParameterState& member : chunk.members) {
      restart_master(member);
    }
  }
}

void ListOptimizer::add_member(const ParameterSettings& settings) {
  parameters_.push_back(settings.parameter);
  const at::Tensor& leaf = settings.parameter.tensor;
  ParameterState member;
  member.name = settings.parameter.name;
  member.leaf = leaf;
  member.memory = memory_of(leaf);
  const bool half = is_half(leaf.scalar_type());
  // A leaf with holes or overlaps has no dense raw memory: its master is a dense copy.
  member.needs_master = half || !leaf.is_non_overlapping_and_dense();
  const at::ScalarType dtype = half ? at::kFloat : leaf.scalar_type();
  const auto same_chunk = [&](const Chunk& chunk) {
    return chunk.lr_scale == settings.lr_scale && chunk.weight_decay == settings.weight_decay &&
           chunk.adapts == settings.adapts && chunk.device == leaf.device() && chunk.dtype == dtype;
  };
  auto chunk = std::find_if(chunks_.begin(), chunks_.end(), same_chunk);
  if (chunk == chunks_.end()) {
    chunks_.push_back(
        {settings.lr_scale, settings.weight_decay, settings.adapts, leaf.device(), dtype, {}, {}});
    chunk = chunks_.end() - 1;
  }
  chunk->members.push_back(std::move(member));
}

void ListOptimizer::make_state(ParameterState& member) const {
  refuse_to_make_while_capturing(concat("optimizer state of ", member.name));
  check_leaf(member);
  member.memory = memory_of(member.leaf);
  if (member.needs_master) {
    const at::ScalarType dtype =
        is_half(member.leaf.scalar_type()) ? at::kFloat : member.leaf.scalar_type();
    member.updated = member.leaf.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true);
    if (!member.updated.is_non_overlapping_and_dense()) {
      member.updated = member.updated.contiguous();
    }
  } else {
    member.updated = member.leaf;
  }
  member.slots.clear();
  for (size_t i = 0; i < rule_->slots().size(); ++i) {
    member.slots.push_back(at::zeros_like(member.updated.detach()));
  }
}

void ListOptimizer::step(const StepScalars& scalars) {
  const TraceScope trace("optimizer", "compute");
  require_means();
  require_lr(scalars);
  if (is_known_to_skip(scalars)) {
    return;
  }
  const at::NoGradGuard no_grad;
  for (Chunk& chunk : chunks_) {
    step_chunk(chunk, scalars);
  }
  bump_versions(parameters_);
}

void ListOptimizer::step_chunk(Chunk& chunk, const StepScalars& scalars) {
  std::vector<ParameterState*> active;
  std::vector<ParameterState*> beginners;
  for (ParameterState& member : chunk.members) {
    if (!member.leaf.grad().defined()) {
      continue;
    }
    check_leaf(member);
    update_master(member);
    const bool begins = !member.has_state;
    if (begins) {
      make_state(member);
    }
    (begins && rule_->first_update_differs() ? beginners : active).push_back(&member);
  }
  update(chunk, active, /*first=*/false, scalars);
  if (!beginners.empty()) {
    const StepScalar& found_inf = scalars.found_inf;
    if (found_inf.defined() && !found_inf.value() &&
        found_inf.tensor(chunk.device).item<float>() != 0.0F) {
      return;  // their first update is still to come
    }
    update(chunk, beginners, /*first=*/true, scalars);
  }
}

void ListOptimizer::update(Chunk& chunk, const std::vector<ParameterState*>& active, bool first,
                           const StepScalars& scalars) {
  if (active.empty()) {
    return;
  }
  UpdateBatch batch;
  batch.first = first;
  batch.lr_scale = chunk.lr_scale;
  batch.weight_decay = chunk.weight_decay;
  batch.adapts = chunk.adapts;
  if (scalars.found_inf.defined()) {
    batch.found_inf = scalars.found_inf.tensor(chunk.device).to(at::kFloat);
  }
  batch.slots.resize(rule_->slots().size());
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> leaves;
  std::vector<at::Tensor> masters;
  for (ParameterState* member : active) {
    batch.params.push_back(member->updated);
    grads.push_back(checked_gradient(member->name, member->leaf));
    batch.steps.push_back(member->step);
    for (size_t slot = 0; slot < batch.slots.size(); ++slot) {
      batch.slots[slot].push_back(member->slots[slot]);
    }
    if (member->needs_master) {
      leaves.push_back(member->leaf);
      masters.push_back(member->updated);
    }
  }
  batch.grads =
      gradients_like(batch.params, std::move(grads), factor_of(scalars, chunk.device, chunk.dtype));
  if (rule_->counts_steps()) {
    count_steps(chunk, batch);
  }
  rule_->update(batch, scalars.lr);
  if (!leaves.empty()) {
    at::_foreach_copy_(leaves, masters);
  }
  for (ParameterState* member : active) {
    member->has_state = true;
  }
}

// A skipped step is not counted, and only the device knows whether it was skipped.
void ListOptimizer::count_steps(Chunk& chunk, UpdateBatch& batch) const {
  const bool all = batch.params.size() == chunk.members.size();
  if (batch.found_inf) {
    const at::Tensor increment = at::rsub(*batch.found_inf, 1.0);
    if (all) {
      chunk.steps.add_(increment);
    } else {
      at::_foreach_add_(batch.steps, increment);
    }
  } else if (all) {
    chunk.steps.add_(1.0);
  } else {
    at::_foreach_add_(batch.steps, 1.0);
  }
}

StateDict ListOptimizer::state_dict() const {
  StateDict state;
  state.values["type"] = rule_->type();
  for (const Chunk& chunk : chunks_) {
    for (const ParameterState& member : chunk.members) {
      add_to(state, member, *rule_);
    }
  }
  return state;
}

StateDict ListOptimizer::replicated_state() const {
  StateDict state;
  for (const Chunk& chunk : chunks_) {
    for (const ParameterState& member : chunk.members) {
      add_unchecked_to(state, member, *rule_);
    }
  }
  return state;
}

void ListOptimizer::load_state_dict(const StateDict& state) {
  const at::NoGradGuard no_grad;
  StateCheck check(state, state_name());
  check.value("type", StateValue(rule_->type()));
  // Copies of the members with their own state, unused until every key is checked.
  std::vector<ParameterState> loaded;
  for (Chunk& chunk : chunks_) {
    for (ParameterState& member : chunk.members) {
      ParameterState& copy = loaded.emplace_back(member);
      if (!copy.has_state) {
        make_state(copy);
      }
      copy.has_state = check.all_or_none(tensors_of(copy, *rule_));
    }
  }
  check.nothing_else();
  ++capture_version_;
  auto next = loaded.begin();
  for (Chunk& chunk : chunks_) {
    for (ParameterState& member : chunk.members) {
      member = std::move(*next++);
      if (!member.has_state) {
        member.step.zero_();
        member.updated = at::Tensor();  // the first step makes it from the leaf of then
        member.slots.clear();
        continue;
      }
      for (auto& [key, tensor] : tensors_of(member, *rule_)) {
        tensor.copy_(state.whole(key));
      }
    }
  }
}

}  // namespace ddp::detail
