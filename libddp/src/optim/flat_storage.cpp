// SPDX-License-Identifier: Apache-2.0
// The memory of a flat optimizer's state, and the tables that its kernels read.
#include <ATen/Functions.h>

#include "ddp/core/error.hpp"
#include "ddp/ops/overwritten.hpp"
#include "optim/capture.hpp"
#include "optim/flat_optimizer.hpp"
#include "optim/flat_tables.hpp"

namespace ddp::detail {
namespace {

constexpr int64_t kAlignment = 64;  // elements: every parameter's piece is 256-byte aligned

}  // namespace

// The listener moves with the leaf's memory.
void FlatOptimizer::watch_leaf(size_t index) {
  ParameterState& state = states_[index];
  state.memory = state.leaf.const_data_ptr();
  if (state.needs_master) {
    ops::on_overwritten(state.leaf, [this, index, alive = std::weak_ptr(lifetime_)](bool exactly) {
      if (!alive.expired()) {
        follow_leaf(states_[index], exactly);
      }
    });
  }
}

// A module may be moved or converted between make_optimizer and a step. Only a leaf's memory may
// change: its slots have its strides once they are made.
void FlatOptimizer::check_leaf(const ParameterState& state) const {
  const at::Tensor& leaf = state.leaf;
  const bool fits = leaf.device() == device_ && is_flat_dtype(leaf.scalar_type()) &&
                    is_half(leaf.scalar_type()) == state.needs_master &&
                    leaf.is_non_overlapping_and_dense();
  const at::Tensor& like = state.slots.empty() ? state.updated : state.slots.front();
  if (!fits || (like.defined() && !same_memory_layout(leaf, like))) {
    refuse_replaced(state.name);
  }
}

// One allocation for the masters and one per slot. A parameter's piece has the leaf's strides, so
// that all tensors have the same element order.
void FlatOptimizer::make_storage() {
  refuse_to_make_while_capturing("the optimizer's state");
  for (size_t i = 0; i < states_.size(); ++i) {
    check_leaf(states_[i]);
    watch_leaf(i);
  }
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device_);
  std::vector<int64_t> offsets(states_.size());
  int64_t all = 0;
  int64_t halves = 0;
  std::vector<int64_t> master_offsets(states_.size());
  for (size_t i = 0; i < states_.size(); ++i) {
    const int64_t padded = (states_[i].leaf.numel() + kAlignment - 1) / kAlignment * kAlignment;
    offsets[i] = all;
    all += padded;
    master_offsets[i] = halves;
    halves += states_[i].needs_master ? padded : 0;
  }
  storage_.push_back(at::empty({halves}, options));
  for (size_t slot = 0; slot < rule_->slots().size(); ++slot) {
    storage_.push_back(at::zeros({all}, options));
  }
  const auto count = static_cast<int64_t>(states_.size());
  counts_ = at::zeros({count}, options);
  biases_ = at::empty({count * static_cast<int64_t>(sizeof(FlatBias))}, options.dtype(at::kByte));
  for (size_t i = 0; i < states_.size(); ++i) {
    ParameterState& state = states_[i];
    const at::Tensor& leaf = state.leaf;
    state.step = counts_.select(0, static_cast<int64_t>(i));
    state.updated = state.needs_master ? storage_.front().as_strided(leaf.sizes(), leaf.strides(),
                                                                     master_offsets[i])
                                       : leaf;
    for (size_t slot = 1; slot < storage_.size(); ++slot) {
      state.slots.push_back(storage_[slot].as_strided(leaf.sizes(), leaf.strides(), offsets[i]));
    }
  }
  cut_chunks();
  make_tables();
}

void FlatOptimizer::cut_chunks() {
  std::vector<FlatChunk> chunks;
  gradients_.clear();
  for (size_t i = 0; i < states_.size(); ++i) {
    if (gradients_.empty() || gradients_.back().num_segments == kFlatMaxGradients) {
      FlatGradients& next = gradients_.emplace_back();
      next.first_segment = static_cast<int32_t>(i);
      next.first_chunk = static_cast<int32_t>(chunks.size());
    }
    first_chunks_.push_back(static_cast<int32_t>(chunks.size()));
    append_chunks(chunks, i, states_[i].leaf.numel());
    gradients_.back().num_segments += 1;
    gradients_.back().num_chunks =
        static_cast<int32_t>(chunks.size()) - gradients_.back().first_chunk;
  }
  chunks_ = to_device(chunks, device_);
  num_chunks_ = static_cast<int64_t>(chunks.size());
  const auto options = at::TensorOptions().dtype(at::kByte).device(device_);
  if (flat_rule_.measures()) {
    squares_ = at::empty({num_chunks_ * static_cast<int64_t>(sizeof(FlatSquares))}, options);
  }
  sums_ = at::zeros({2, num_chunks_}, options.dtype(at::kDouble));
}

void FlatOptimizer::make_tables() {
  refuse_to_make_while_capturing("the optimizer's table of parameters");
  std::vector<FlatSegment> segments;
  for (size_t i = 0; i < states_.size(); ++i) {
    segments.push_back(segment_of(i));
  }
  segments_ = to_device(segments, device_);
}

FlatSegment FlatOptimizer::segment_of(size_t index) const {
  const ParameterState& state = states_[index];
  FlatSegment segment;
  segment.weight = state.updated.data_ptr<float>();
  segment.aligned = is_aligned(segment.weight, at::kFloat);
  for (size_t slot = 0; slot < state.slots.size(); ++slot) {
    segment.slots[slot] = state.slots[slot].data_ptr<float>();
  }
  if (state.needs_master) {
    segment.leaf = state.leaf.data_ptr();
    segment.leaf_dtype = flat_dtype(state.leaf.scalar_type());
    segment.aligned = segment.aligned && is_aligned(segment.leaf, state.leaf.scalar_type());
  }
  segment.numel = state.leaf.numel();
  segment.lr_scale = static_cast<float>(settings_[index].lr_scale);
  segment.weight_decay = static_cast<float>(settings_[index].weight_decay);
  segment.first_chunk = first_chunks_[index];
  segment.adapts = settings_[index].adapts;
  return segment;
}

// A parameter may have other memory now (set_data, module->to), with or without other values.
// Updates the table and the master.
void FlatOptimizer::follow_leaves() {
  std::vector<size_t> moved;
  for (size_t i = 0; i < states_.size(); ++i) {
    if (has_moved(states_[i])) {
      check_leaf(states_[i]);
      moved.push_back(i);
    }
  }
  if (moved.empty()) {
    return;
  }
  make_tables();
  ++num_changes_;  // graphs hold the tables before
  for (const size_t i : moved) {
    follow_leaf(states_[i], /*exactly=*/false);
    watch_leaf(i);  // not where that threw
  }
}

}  // namespace ddp::detail
