// SPDX-License-Identifier: Apache-2.0
#include "ddp/optim/optimizer.hpp"

#include <ATen/Functions.h>

#include "ddp/detail/check.hpp"
#include "optim/capture.hpp"
#include "optim/on_device.hpp"
#include "reduce/model/replica_check.hpp"
#include "reduce/step_guard.hpp"

namespace ddp {

at::Tensor StepScalar::tensor(at::Device device) const {
  DDP_CHECK(defined());
  if (tensor_.defined()) {
    const bool is_double = tensor_.scalar_type() == at::kDouble;
    return detail::on_device(tensor_, device, is_double ? at::kDouble : at::kFloat);
  }
  // A fill on the device instead of a copy from pageable memory: the host does not wait.
  return at::full({}, *value_, at::TensorOptions().dtype(at::kFloat).device(device));
}

std::vector<at::Tensor> Optimizer::gradients() const {
  std::vector<at::Tensor> gradients;
  for (const NamedParameter& parameter : named_parameters()) {
    if (const at::Tensor& grad = parameter.tensor.grad(); grad.defined()) {
      gradients.push_back(grad);
    }
  }
  return gradients;
}

void Optimizer::require_means() {
  const auto checks = detail::StepGuard::check_all(named_parameters());
  if (checks.empty() || detail::stream_is_capturing()) {
    return;
  }
  ++num_watched_steps_;
  for (const auto& check : checks) {
    if (check->is_due(num_watched_steps_)) {
      check->run(
          [this] {
            return std::vector{detail::OptimizerState{replicated_state(), named_parameters()}};
          },
          num_watched_steps_);
    }
  }
}

void Optimizer::zero_grad() {
  for (const NamedParameter& parameter : named_parameters()) {
    parameter.tensor.mutable_grad().reset();
  }
}

}  // namespace ddp
