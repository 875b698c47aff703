// SPDX-License-Identifier: Apache-2.0
#include "ddp/optim/ema.hpp"

#include <ATen/Functions.h>

#include <algorithm>
#include <map>

#include "core/log/error_text.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/reduce/data_parallel_model.hpp"
#include "optim/flat/averages.hpp"
#include "optim/state_check.hpp"
#include "optim/tensor_groups.hpp"
#include "reduce/model/replica_check.hpp"
#include "reduce/reducer.hpp"

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

NamedParameters parameters_and_buffers(const DataParallelModel& model) {
  auto all = model.trained_parameters();
  const auto buffers = model.named_buffers();
  all.insert(all.end(), buffers.begin(), buffers.end());
  return all;
}

void foreach_copy(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
}

}  // namespace

struct Ema::State {
  NamedParameters tensors;  // of a model: its trained parameters, then its buffers
  double decay;
  size_t num_parameters = tensors.size();
  const DataParallelModel* model = nullptr;  // null: averages a list of tensors
  NamedParameters averages = {};
  detail::FlatAverages flat = {};
  bool swapped = false;
  std::shared_ptr<const detail::ReplicaCheck::Source> compared = nullptr;

  // Each rank averages its own buffers, so only averages of parameters are equal on all ranks.
  NamedParameters replicated() const {
    NamedParameters common;
    for (size_t i = 0; i < num_parameters; ++i) {
      common.push_back({"EMA of " + averages[i].name, averages[i].tensor});
    }
    return common;
  }
  // A module may replace a buffer's tensor instead of writing to it.
  void reread_buffers() {
    if (model == nullptr) {
      return;
    }
    model->reducer().finish_pending();  // rank 0's buffers may still be on their way
    const auto buffers = model->named_buffers();
    if (buffers.size() != tensors.size() - num_parameters) {
      throw MismatchError(concat("Ema: the model has ", buffers.size(), " buffers, but had ",
                                 tensors.size() - num_parameters,
                                 " when the averages began; fix: register all buffers before"));
    }
    std::copy(buffers.begin(), buffers.end(),
              tensors.begin() + static_cast<std::ptrdiff_t>(num_parameters));
  }
  // For a checkpoint of a program that averaged the parameters alone.
  void restart_buffers() {
    reread_buffers();
    for (size_t i = num_parameters; i < tensors.size(); ++i) {
      averages[i].tensor.copy_(tensors[i].tensor);
    }
    log_info(concat("ema: the checkpoint's averages have no buffers, so the averages of ",
                    tensors.size() - num_parameters, " buffers (", tensors[num_parameters].name,
                    " …) start again at the model's current values"));
  }
  // Operations would broadcast a smaller tensor.
  void refuse_other_shapes() const {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto& [name, tensor] = tensors[i];
      if (tensor.sizes() != averages[i].tensor.sizes()) {
        throw MismatchError(concat("Ema: ", name, " has shape ", tensor.sizes(),
                                   ", its average has ", averages[i].tensor.sizes(),
                                   "; fix: make the Ema after the last change of shape"));
      }
    }
  }
  void refuse_swapped(const std::string& method) const {
    if (swapped) {
      throw Error(
          ExitCode::UserException,
          "Ema::" + method + " while the averages are swapped in; end the Swap's scope first");
    }
  }
};

Ema::Ema(const NamedParameters& tensors, const EmaOptions& options)
    : state_(std::make_unique<State>(State{.tensors = tensors, .decay = options.decay})) {
  if (!(options.decay >= 0.0 && options.decay <= 1.0)) {
    throw SettingsError(concat("ema.decay is ", options.decay, ": must be between 0 and 1"));
  }
  const at::NoGradGuard no_grad;
  for (const NamedParameter& entry : tensors) {
    state_->averages.push_back({entry.name, start_average(entry.tensor)});
  }
}

Ema::Ema(const DataParallelModel& model, const EmaOptions& options)
    : Ema(parameters_and_buffers(model), options) {
  state_->num_parameters = model.trained_parameters().size();
  state_->model = &model;
  if (const auto& replicas = model.reducer().guard().replicas()) {
    state_->compared = replicas->add_source([state = state_.get()] { return state->replicated(); });
  }
}
Ema::~Ema() = default;

const NamedParameters& Ema::averages() const {
  return state_->averages;
}

void Ema::update() {
  state_->refuse_swapped("update");
  state_->reread_buffers();
  state_->refuse_other_shapes();
  const auto& tensors = state_->tensors;
  const double weight_share = 1.0 - state_->decay;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> flat_averages;
  std::vector<at::Tensor> flat_weights;
  std::vector<at::Tensor> averages;
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> copied_to;
  std::vector<at::Tensor> copied_from;
  std::vector<at::Tensor> casts;
  std::vector<at::Tensor> halves;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor weight = tensors[i].tensor.detach();
    const at::Tensor& average = state_->averages[i].tensor;
    if (!at::isFloatingType(average.scalar_type())) {
      copied_to.push_back(average);
      copied_from.push_back(weight);
    } else if (detail::FlatAverages::takes(average, weight, tensors.front().tensor.device())) {
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
  state_->flat.update(flat_averages, flat_weights, weight_share);
  foreach_copy(copied_to, copied_from);
  foreach_copy(casts, halves);
  // lerp needs one dtype and device per call; both lists have the same groups.
  const auto average_groups = detail::group_tensors(averages);
  const auto weight_groups = detail::group_tensors(weights);
  for (size_t i = 0; i < average_groups.size(); ++i) {
    at::_foreach_lerp_(average_groups[i].tensors, weight_groups[i].tensors, weight_share);
  }
}

class Ema::Swap {
 public:
  explicit Swap(State& ema) : ema_(ema) {
    ema_.refuse_swapped("swap_in");
    const at::NoGradGuard no_grad;
    ema_.reread_buffers();
    ema_.refuse_other_shapes();
    const std::vector<at::Tensor> weights = tensors_of(ema_.tensors);
    for (const at::Tensor& weight : weights) {
      backup_.push_back(weight.clone());
    }
    foreach_copy(weights, tensors_of(ema_.averages));
    ema_.swapped = true;
  }
  ~Swap() {
    ema_.swapped = false;
    try {
      const at::NoGradGuard no_grad;
      foreach_copy(tensors_of(ema_.tensors), backup_);
    } catch (const std::exception& error) {
      log_error(concat("Ema: the weights could not be put back: ", detail::message_of(error)));
    }
  }
  Swap(const Swap&) = delete;
  Swap& operator=(const Swap&) = delete;

 private:
  State& ema_;
  std::vector<at::Tensor> backup_;
};

std::shared_ptr<Ema::Swap> Ema::swap_in() {
  return std::make_shared<Swap>(*state_);
}

StateDict Ema::state_dict() const {
  state_->refuse_swapped("state_dict");  // the model's weights would be saved as averages
  StateDict state;
  for (const NamedParameter& average : averages()) {
    state.tensors[average.name] = average.tensor;
  }
  return state;
}

void Ema::load_state_dict(const StateDict& state) {
  state_->refuse_swapped("load_state_dict");  // the end of the swap would undo it
  const at::NoGradGuard no_grad;
  detail::StateCheck check(state, state_name());
  std::map<StateKey, at::Tensor> parameters;
  std::map<StateKey, at::Tensor> buffers;
  for (size_t i = 0; i < averages().size(); ++i) {
    auto& expected = i < state_->num_parameters ? parameters : buffers;
    expected[averages()[i].name] = averages()[i].tensor;
  }
  if (!check.all_or_none(parameters) && !parameters.empty()) {
    throw MismatchError("state of ema: " + parameters.begin()->first.text() + " is missing");
  }
  const bool has_buffers = check.all_or_none(buffers) || buffers.empty();
  check.nothing_else();
  for (auto& [key, tensor] : parameters) {
    tensor.copy_(state.tensors.at(key));
  }
  if (has_buffers) {
    for (auto& [key, tensor] : buffers) {
      tensor.copy_(state.tensors.at(key));
    }
  } else {
    state_->restart_buffers();
  }
}

}  // namespace ddp
