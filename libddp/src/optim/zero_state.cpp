// SPDX-License-Identifier: Apache-2.0
// Saves and loads a sharded optimizer's state as a whole, under parameter names, so checkpoints do
// not depend on ranks.
#include <ATen/Functions.h>

#include <map>

#include "optim/state_check.hpp"
#include "optim/zero_optimizer.hpp"

namespace ddp::detail {
namespace {

constexpr int64_t kHasState = 0;  // rows of gather_counts
constexpr int64_t kStep = 1;

std::string key_of(const std::string& parameter, const std::string& slot) {
  return "state." + parameter + "." + slot;
}

// Elements [begin, begin + numel) of `whole` in the memory order of `like`.
at::Tensor cut_like(const at::Tensor& whole, const at::Tensor& like, int64_t begin, int64_t numel) {
  const at::Tensor ordered = at::empty_strided(like.sizes(), like.strides(), whole.options());
  ordered.copy_(whole);
  return ordered.as_strided({like.numel()}, {1}, 0).narrow(0, begin, numel);
}

}  // namespace

std::vector<std::string> ZeroOptimizer::slots_of(const ZeroBucket& bucket) const {
  auto slots = rule_->slots();
  if (is_half(bucket.leaves.front().scalar_type())) {
    slots.emplace_back("master");
  }
  return slots;
}

// For every parameter, from the ranks with a piece of it: whether it has state, and its updates.
at::Tensor ZeroOptimizer::gather_counts(const StateDict& own) const {
  at::Tensor counts =
      at::zeros({2, static_cast<int64_t>(parameters_.size())}, at::TensorOptions(at::kFloat));
  for (const ZeroBucket& bucket : buckets_) {
    for (const ZeroPiece& piece : bucket.pieces) {
      const std::string& name = parameters_[piece.parameter].name;
      const auto column = static_cast<int64_t>(piece.parameter);
      for (const std::string& slot : slots_of(bucket)) {
        if (own.tensors.contains(key_of(name, slot))) {
          counts[kHasState][column] = 1;
        }
      }
      if (const auto step = own.tensors.find(key_of(name, "step")); step != own.tensors.end()) {
        counts[kStep][column] = step->second.cpu();
      }
    }
  }
  counts = counts.to(device_);
  communicator_->all_reduce(counts, ReduceOp::Max)->wait();
  return counts.cpu();
}

void ZeroOptimizer::gather_bucket(const ZeroBucket& bucket, const StateDict& own,
                                  const at::Tensor& counts, StateDict& state) const {
  for (const std::string& slot : slots_of(bucket)) {
    const auto options = at::TensorOptions().dtype(at::kFloat).device(device_);
    const at::Tensor part = at::zeros({bucket.shard.numel()}, options);
    for (const ZeroPiece& piece : bucket.pieces) {
      const auto found = own.tensors.find(key_of(parameters_[piece.parameter].name, slot));
      if (found != own.tensors.end()) {
        part.narrow(0, piece.offset, piece.leaf.numel()).copy_(found->second);
      }
    }
    const at::Tensor whole = at::empty({bucket.buffer.numel()}, options);
    communicator_->all_gather(whole, part)->wait();
    const at::Tensor host = whole.cpu();
    for (size_t i = 0; i < bucket.parameters.size(); ++i) {
      const size_t parameter = bucket.parameters[i];
      if (counts[kHasState][static_cast<int64_t>(parameter)].item<float>() != 0.0F) {
        const at::Tensor& layout = leaves_[parameter].layout;
        state.tensors[key_of(parameters_[parameter].name, slot)] =
            host.as_strided(layout.sizes(), layout.strides(), bucket.offsets[i]);
      }
    }
  }
}

StateDict ZeroOptimizer::state_dict() const {
  const at::NoGradGuard no_grad;
  show_leaves(moved_leaves(/*refuses=*/false));
  const StateDict own = own_ ? own_->state_dict() : StateDict();
  const at::Tensor counts = gather_counts(own);
  StateDict state;
  state.values["type"] = rule_->type();
  for (const ZeroBucket& bucket : buckets_) {
    gather_bucket(bucket, own, counts, state);
  }
  for (size_t i = 0; i < parameters_.size() && rule_->counts_steps(); ++i) {
    const auto column = static_cast<int64_t>(i);
    if (counts[kHasState][column].item<float>() != 0.0F) {
      state.tensors[key_of(parameters_[i].name, "step")] = counts[kStep][column].clone();
    }
  }
  return state;
}

void ZeroOptimizer::load_state_dict(const StateDict& state) {
  const at::NoGradGuard no_grad;
  follow_leaves(/*refuses=*/false);  // now, or the next step would, over what is loaded
  take_state(state);
}

void ZeroOptimizer::take_state(const StateDict& state) {
  StateCheck check(state, state_name());
  check.value("type", StateValue(rule_->type()));
  const at::Tensor count = at::zeros({}, at::TensorOptions(at::kFloat));
  bool any = false;
  for (const ZeroBucket& bucket : buckets_) {
    for (const size_t i : bucket.parameters) {
      std::map<std::string, at::Tensor> expected;
      for (const std::string& slot : slots_of(bucket)) {
        expected[key_of(parameters_[i].name, slot)] = parameters_[i].tensor;
      }
      if (rule_->counts_steps()) {
        expected[key_of(parameters_[i].name, "step")] = count;
      }
      any = check.all_or_none(expected) || any;
    }
  }
  check.nothing_else();
  ++num_changes_;
  has_state_ = any;
  if (!own_) {
    return;
  }
  StateDict own;
  own.values = state.values;
  for (const ZeroBucket& bucket : buckets_) {
    for (const ZeroPiece& piece : bucket.pieces) {
      const NamedParameter& parameter = parameters_[piece.parameter];
      for (const std::string& slot : slots_of(bucket)) {
        const auto found = state.tensors.find(key_of(parameter.name, slot));
        if (found != state.tensors.end()) {
          own.tensors[found->first] = cut_like(found->second, leaves_[piece.parameter].layout,
                                               piece.begin, piece.leaf.numel());
        }
      }
      if (const auto step = state.tensors.find(key_of(parameter.name, "step"));
          rule_->counts_steps() && step != state.tensors.end()) {
        own.tensors[step->first] = step->second;
      }
    }
  }
  own_->load_state_dict(own);
}

}  // namespace ddp::detail
