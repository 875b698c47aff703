// SPDX-License-Identifier: Apache-2.0
// Saving and loading a flat optimizer's state.
#include "optim/flat_optimizer.hpp"
#include "optim/state_check.hpp"

namespace ddp::detail {

StateDict FlatOptimizer::state_dict() const {
  StateDict state;
  state.values["type"] = rule_->type();
  for (const ParameterState& parameter : states_) {
    add_to(state, parameter, *rule_);
  }
  return state;
}

void FlatOptimizer::load_state_dict(const StateDict& state) {
  const at::NoGradGuard no_grad;
  StateCheck check(state, state_name());
  check.value("type", StateValue(rule_->type()));
  prepare_storage();  // follows moved leaves first: later, that would overwrite the loaded state
  std::vector<bool> has_state;
  for (const ParameterState& parameter : states_) {
    has_state.push_back(check.all_or_none(tensors_of(parameter, *rule_)));
  }
  check.nothing_else();
  ++num_changes_;
  for (size_t i = 0; i < states_.size(); ++i) {
    states_[i].has_state = has_state[i];
    for (auto& [key, tensor] : tensors_of(states_[i], *rule_)) {
      if (has_state[i]) {
        tensor.copy_(state.tensors.at(key));
      } else {
        tensor.zero_();
      }
    }
  }
}

}  // namespace ddp::detail
