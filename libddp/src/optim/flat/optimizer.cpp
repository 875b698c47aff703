// SPDX-License-Identifier: Apache-2.0
#include "optim/flat/optimizer.hpp"

#include <ATen/Functions.h>

#include "core/log/trace_recorder.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"
#include "ddp/detail/trace_scope.hpp"
#include "optim/capture.hpp"
#include "optim/flat/layout.hpp"
#include "optim/flat/passes.hpp"
#include "optim/state_check.hpp"
#include "optim/step_checks.hpp"

#ifdef DDP_HAS_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#endif

namespace ddp::detail {
namespace {

constexpr int64_t kAlignment = 64;  // elements: every parameter's piece is 256-byte aligned

FlatRuleType flat_rule_type(OptimizerType type) {
  switch (type) {
    case OptimizerType::Sgd:
      return FlatRuleType::Sgd;
    case OptimizerType::Lars:
      return FlatRuleType::Lars;
    case OptimizerType::Lamb:
      return FlatRuleType::Lamb;
    default:
      return FlatRuleType::Adam;
  }
}

FlatRule flat_rule_of(const OptimizerOptions& options) {
  return {.type = flat_rule_type(options.type),
          .has_momentum = options.momentum != 0.0,
          .amsgrad = options.amsgrad,
          .nesterov = options.nesterov,
          .decoupled = options.type == OptimizerType::AdamW,
          .momentum = static_cast<float>(options.momentum),
          .beta1 = options.beta1,
          .beta2 = options.beta2,
          .eps = static_cast<float>(options.eps),
          .trust_coefficient = static_cast<float>(options.trust_coefficient)};
}

}  // namespace

std::string reason_against_flat(const std::vector<ParameterSettings>& parameters,
                                const OptimizerOptions& options) {
  if (options.type == OptimizerType::Sgd && options.dampening != 0.0) {
    return "optimizer.dampening is not 0";
  }
  for (const ParameterSettings& settings : parameters) {
    const at::Tensor& leaf = settings.parameter.tensor;
    const std::string parameter = "parameter " + settings.parameter.name;
    if (!is_flat_dtype(leaf.scalar_type())) {
      return concat(parameter, " is of dtype ", leaf.scalar_type());
    }
    if (!leaf.is_non_overlapping_and_dense()) {
      return parameter + " has holes in its memory";
    }
    if (leaf.device() != parameters.front().parameter.tensor.device()) {
      return concat(parameter, " is on ", leaf.device(), ", others on ",
                    parameters.front().parameter.tensor.device());
    }
    if (!leaf.is_cpu() && !leaf.is_cuda()) {
      return concat(parameter, " is on ", leaf.device());
    }
  }
  return parameters.empty() ? "there are no parameters" : "";
}

FlatOptimizer::FlatOptimizer(const std::vector<ParameterSettings>& parameters,
                             const OptimizerOptions& options, Listeners* exact_syncs)
    : rule_(make_update_rule(options)),
      flat_rule_(flat_rule_of(options)),
      settings_(parameters),
      device_(parameters.front().parameter.tensor.device()) {
  with_flat_rule(flat_rule_, [&](auto arithmetic) {
    constexpr size_t kSlots = decltype(arithmetic)::kSlots;
    static_assert(kSlots <= kFlatMaxSlots);
    DDP_CHECK(rule_->slots().size() == kSlots, rule_->type());
  });
  for (const ParameterSettings& settings : settings_) {
    parameters_.push_back(settings.parameter);
    ParameterState& state = states_.emplace_back();
    state.name = settings.parameter.name;
    state.leaf = settings.parameter.tensor;
    state.memory = memory_of(state.leaf);
    state.needs_master = is_half(state.leaf.scalar_type());
  }
  if (exact_syncs != nullptr) {
    on_exact_sync_ = exact_syncs->add([this] { restart_masters(); });
  }
}

// One allocation for the masters and one per slot. A parameter's piece has the leaf's strides, so
// that all tensors have the same element order.
void FlatOptimizer::make_storage() {
  refuse_to_make_while_capturing("the optimizer's state");
  for (size_t i = 0; i < states_.size(); ++i) {
    check_leaf(states_[i]);
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
#ifdef DDP_HAS_CUDA
  if (device_.is_cuda()) {
    // Cached blocks of the first backward are larger. Their rest could not be used by a graph.
    c10::cuda::CUDACachingAllocator::emptyCache();
  }
#endif
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
  make_chunks();
  make_tables();
}

void FlatOptimizer::make_chunks() {
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
    states_[i].memory = memory_of(states_[i].leaf);
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

// A parameter may have other memory now (set_data, module->to).
void FlatOptimizer::update_moved_leaves() {
  bool any = false;
  for (const ParameterState& state : states_) {
    if (!is_in(state.leaf, state.memory)) {
      check_leaf(state);
      any = true;
    }
  }
  if (any) {
    make_tables();
    ++capture_version_;  // graphs hold the tables before
  }
}

void FlatOptimizer::restart_masters() {
  for (const ParameterState& state : states_) {
    restart_master(state);
  }
}

// Copies leaves into masters when their first gradients arrive.
void FlatOptimizer::init_states() {
  std::vector<at::Tensor> masters;
  std::vector<at::Tensor> leaves;
  for (ParameterState& state : states_) {
    if (state.has_state || !state.leaf.grad().defined()) {
      continue;
    }
    refuse_to_make_while_capturing(concat("optimizer state of ", state.name));
    state.has_state = true;
    if (state.needs_master) {
      masters.push_back(state.updated);
      leaves.push_back(state.leaf);
    }
  }
  if (!masters.empty()) {
    at::_foreach_copy_(masters, leaves);
  }
}

void FlatOptimizer::read_gradients() {
  std::vector<at::Tensor> copies;
  std::vector<at::Tensor> originals;
  for (size_t i = 0; i < states_.size(); ++i) {
    const ParameterState& state = states_[i];
    const at::Tensor& grad = checked_gradient(state.name, state.leaf);
    if (grad.defined() &&
        (!is_flat_dtype(grad.scalar_type()) || !same_memory_layout(grad, state.updated))) {
      originals.push_back(grad);
      set_gradient(i, copies.emplace_back(at::empty_like(state.updated)));
    } else {
      set_gradient(i, grad);
    }
  }
  if (!copies.empty()) {
    at::_foreach_copy_(copies, originals);
    kept_.insert(kept_.end(), copies.begin(), copies.end());
  }
}

void FlatOptimizer::set_gradient(size_t index, const at::Tensor& grad) {
  FlatGradients& run = gradients_[index / kFlatMaxGradients];
  const size_t local = index % kFlatMaxGradients;
  // An empty gradient has no address, and nullptr means that there is none. Nothing reads it.
  run.data[local] = !grad.defined()     ? nullptr
                    : grad.numel() == 0 ? segments_.data_ptr()
                                        : grad.data_ptr();
  run.dtype[local] = grad.defined() ? flat_dtype(grad.scalar_type()) : FlatDtype::Float32;
  run.aligned[local] = grad.defined() && is_aligned(run.data[local], grad.scalar_type());
}

FlatScalar FlatOptimizer::scalar(const StepScalar& given, float absent) {
  if (!given.defined()) {
    return {.host = absent};
  }
  if (given.value()) {
    return {.host = static_cast<float>(*given.value())};
  }
  return {.device = kept_.emplace_back(given.tensor(device_).to(at::kFloat)).data_ptr<float>()};
}

FlatStep FlatOptimizer::arguments(const StepScalars& scalars) {
  return {.segments = static_cast<const FlatSegment*>(segments_.data_ptr()),
          .chunks = static_cast<const FlatChunk*>(chunks_.data_ptr()),
          .counts = counts_.data_ptr<float>(),
          .biases = static_cast<FlatBias*>(biases_.data_ptr()),
          .squares = squares_.defined() ? static_cast<FlatSquares*>(squares_.data_ptr()) : nullptr,
          .rule = flat_rule_,
          .lr = scalar(scalars.lr, 0.0F),
          .inverse_scale = scalar(scalars.inverse_scale, 1.0F),
          .clip_factor = scalar(scalars.clip_factor, 1.0F),
          .found_inf = scalar(scalars.found_inf, 0.0F)};
}

void FlatOptimizer::step(const StepScalars& scalars) {
  const TraceScope trace("optimizer", "compute");
  require_means();
  require_lr(scalars);
  if (is_known_to_skip(scalars)) {
    return;
  }
  const at::NoGradGuard no_grad;
  prepare_storage();
  init_states();
  read_gradients();
  const FlatStep step = arguments(scalars);
  for (const FlatGradients& gradients : gradients_) {
    flat_update(step, gradients, device_);
  }
  bump_versions(parameters_);
  kept_.clear();
}

void FlatOptimizer::prepare_storage() {
  kept_.clear();
  if (storage_.empty()) {
    make_storage();
  } else {
    update_moved_leaves();
  }
}

GradientScan FlatOptimizer::scan_gradients(const StepScalar& inverse_scale, double max_norm) {
  const TraceScope trace("scan gradients", "compute");
  const at::NoGradGuard no_grad;
  prepare_storage();
  read_gradients();
  // New memory for each scan: callers keep the norm until it is logged.
  const at::Tensor found = at::empty({4}, counts_.options());
  const FlatScan scan{.segments = static_cast<const FlatSegment*>(segments_.data_ptr()),
                      .chunks = static_cast<const FlatChunk*>(chunks_.data_ptr()),
                      .inverse_scale = scalar(inverse_scale, 1.0F),
                      .max_norm = static_cast<float>(max_norm),
                      .num_chunks = static_cast<int32_t>(num_chunks_),
                      .sums = sums_.data_ptr<double>(),
                      .bad = reinterpret_cast<int32_t*>(sums_.data_ptr<double>() + num_chunks_),
                      .found = found.data_ptr<float>(),
                      .report = non_finite_counts(device_).data_ptr<int32_t>()};
  for (const FlatGradients& gradients : gradients_) {
    flat_scan(scan, gradients, device_);
  }
  flat_scan_end(scan, device_);
  kept_.clear();
  return {.norm = found.select(0, 0),
          .found_inf = found.select(0, 1),
          .clip_factor = found.select(0, 2),
          .first_non_finite = found.view(at::kInt).select(0, 3)};
}

StateDict FlatOptimizer::state_dict() const {
  StateDict state;
  state.values["type"] = rule_->type();
  for (const ParameterState& parameter : states_) {
    add_to(state, parameter, *rule_);
  }
  return state;
}

StateDict FlatOptimizer::replicated_state() const {
  StateDict state;
  for (const ParameterState& parameter : states_) {
    add_unchecked_to(state, parameter, *rule_);
  }
  return state;
}

void FlatOptimizer::load_state_dict(const StateDict& state) {
  const at::NoGradGuard no_grad;
  StateCheck check(state, state_name());
  check.value("type", StateValue(rule_->type()));
  prepare_storage();
  std::vector<bool> has_state;
  for (const ParameterState& parameter : states_) {
    has_state.push_back(check.all_or_none(tensors_of(parameter, *rule_)));
  }
  check.nothing_else();
  ++capture_version_;
  for (size_t i = 0; i < states_.size(); ++i) {
    states_[i].has_state = has_state[i];
    for (auto& [key, tensor] : tensors_of(states_[i], *rule_)) {
      if (has_state[i]) {
        tensor.copy_(state.whole(key));
      } else {
        tensor.zero_();
      }
    }
  }
}

}  // namespace ddp::detail
