// SPDX-License-Identifier: Apache-2.0
#include "optim/flat_optimizer.hpp"

#include <ATen/Functions.h>

#include "ddp/core/error.hpp"
#include "ddp/core/trace_recorder.hpp"
#include "optim/capture.hpp"
#include "optim/flat_launch.hpp"
#include "optim/flat_tables.hpp"

namespace ddp::detail {
namespace {

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

FlatRule flat_rule_of(const OptimizerOptions& options, const UpdateRule& rule) {
  return {.type = flat_rule_type(options.type),
          .num_slots = static_cast<int>(rule.slots().size()),
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
                             const OptimizerOptions& options)
    : rule_(make_update_rule(options)),
      flat_rule_(flat_rule_of(options, *rule_)),
      settings_(parameters),
      device_(parameters.front().parameter.tensor.device()) {
  for (const ParameterSettings& settings : settings_) {
    parameters_.push_back(settings.parameter);
    ParameterState& state = states_.emplace_back();
    state.name = settings.parameter.name;
    state.leaf = settings.parameter.tensor;
    state.needs_master = is_half(state.leaf.scalar_type());
    watch_leaf(states_.size() - 1);
  }
}

// Copies leaves into masters when their first gradients arrive.
void FlatOptimizer::begin_states() {
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
  run.data[local] = grad.defined() ? grad.data_ptr() : nullptr;
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
  return {.device = kept_.emplace_back(given.tensor(device_)).data_ptr<float>()};
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
  if (!scalars.lr.defined()) {
    throw SettingsError("Optimizer::step needs a learning rate: step({.lr = 0.1})");
  }
  if (scalars.found_inf.value().value_or(0.0) != 0.0) {
    return;
  }
  const at::NoGradGuard no_grad;
  prepare_storage();
  begin_states();
  read_gradients();
  const FlatStep step = arguments(scalars);
  for (const FlatGradients& gradients : gradients_) {
    flat_update(step, gradients, device_);
  }
  kept_.clear();
}

void FlatOptimizer::prepare_storage() {
  kept_.clear();
  if (storage_.empty()) {
    make_storage();
  } else {
    follow_leaves();
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

}  // namespace ddp::detail
