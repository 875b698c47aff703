// SPDX-License-Identifier: Apache-2.0
#include "ddp/optim/ema.hpp"

#include <ATen/Functions.h>

#include <utility>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "optim/flat/averages.hpp"
#include "optim/state_check.hpp"
#include "optim/tensor_groups.hpp"

namespace ddp {
namespace {

at::Tensor start_average(const at::Tensor& tensor) {
  const bool half = tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf;
  return tensor.detach().to(half ? at::kFloat : tensor.scalar_type(), /*non_blocking=*/false,
                            /*copy=*/true);
}

std::vector<at::Tensor> tensors_of(const NamedParameters& named) {
  std::vector<at::Tensor> tensors;
  for (const NamedParameter& entry : named) {
    tensors.push_back(entry.tensor.detach());
  }
  return tensors;
}

void foreach_copy(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
}

}  // namespace

void describe_fields(EmaOptions& o, FieldVisitor& v) {
  v.field({.name = "decay",
           .doc = "Share of the average that each update keeps.",
           .min = 0.0,
           .max = 1.0},
          o.decay);
}

Ema::Ema(const NamedParameters& tensors, const EmaOptions& options)
    : tensors_(tensors), decay_(options.decay), flat_(std::make_shared<detail::FlatAverages>()) {
  if (!(decay_ >= 0.0 && decay_ <= 1.0)) {
    throw SettingsError(concat("ema.decay is ", decay_, ": must be between 0 and 1"));
  }
  const at::NoGradGuard no_grad;
  for (const NamedParameter& entry : tensors_) {
    averages_.push_back({entry.name, start_average(entry.tensor)});
  }
}

void Ema::update() {
  refuse_swapped("update");
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> flat_averages;
  std::vector<at::Tensor> flat_weights;
  std::vector<at::Tensor> averages;
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> copied_to;
  std::vector<at::Tensor> copied_from;
  std::vector<at::Tensor> casts;
  std::vector<at::Tensor> halves;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const at::Tensor weight = tensors_[i].tensor.detach();
    const at::Tensor& average = averages_[i].tensor;
    if (!at::isFloatingType(average.scalar_type())) {
      copied_to.push_back(average);
      copied_from.push_back(weight);
    } else if (detail::FlatAverages::takes(average, weight, tensors_.front().tensor.device())) {
      flat_averages.push_back(average);
      flat_weights.push_back(weight);
    } else if (weight.scalar_type() != average.scalar_type()) {
      halves.push_back(weight);
      weights.push_back(casts.emplace_back(at::empty_like(average)));
      averages.push_back(average);
    } else {
      weights.push_back(weight);
      averages.push_back(average);
    }
  }
  flat_->update(flat_averages, flat_weights, 1.0 - decay_);
  foreach_copy(copied_to, copied_from);
  foreach_copy(casts, halves);
  // lerp needs one dtype and device per call; both lists have the same groups.
  const auto average_groups = detail::group_tensors(averages);
  const auto weight_groups = detail::group_tensors(weights);
  for (size_t i = 0; i < average_groups.size(); ++i) {
    at::_foreach_lerp_(average_groups[i].tensors, weight_groups[i].tensors, 1.0 - decay_);
  }
}

Ema::Swap Ema::swap_in() {
  return Swap(this);
}

void Ema::refuse_swapped(const std::string& method) const {
  if (swapped_) {
    throw Error(
        ExitCode::UserException,
        "Ema::" + method + " while the averages are swapped in; end the Swap's scope first");
  }
}

Ema::Swap::Swap(Ema* ema) : ema_(ema) {
  ema->refuse_swapped("swap_in");
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> weights = tensors_of(ema->tensors_);
  for (const at::Tensor& weight : weights) {
    backup_.push_back(weight.clone());
  }
  foreach_copy(weights, tensors_of(ema->averages_));
  ema->swapped_ = true;
}

Ema::Swap::Swap(Swap&& other) noexcept
    : ema_(std::exchange(other.ema_, nullptr)), backup_(std::move(other.backup_)) {}

Ema::Swap::~Swap() {
  if (!ema_) {
    return;
  }
  ema_->swapped_ = false;
  try {
    const at::NoGradGuard no_grad;
    foreach_copy(tensors_of(ema_->tensors_), backup_);
  } catch (const std::exception& error) {
    log_error(concat("Ema: the weights could not be put back: ", error.what()));
  }
}

StateDict Ema::state_dict() const {
  StateDict state;
  for (const NamedParameter& average : averages_) {
    state.tensors[average.name] = average.tensor;
  }
  return state;
}

void Ema::load_state_dict(const StateDict& state) {
  const at::NoGradGuard no_grad;
  detail::StateCheck check(state, state_name());
  std::map<std::string, at::Tensor> expected;
  for (const NamedParameter& average : averages_) {
    expected[average.name] = average.tensor;
  }
  if (!check.all_or_none(expected) && !expected.empty()) {
    throw MismatchError("state of ema: " + expected.begin()->first + " is missing");
  }
  check.nothing_else();
  for (auto& [name, tensor] : expected) {
    tensor.copy_(state.tensors.at(name));
  }
}

}  // namespace ddp
