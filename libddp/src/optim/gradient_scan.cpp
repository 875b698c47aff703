// SPDX-License-Identifier: Apache-2.0
// Optimizer::scan_gradients for all kinds of gradients, with ATen's foreach operations.
#include <ATen/Functions.h>

#include <algorithm>
#include <limits>

#include "ddp/core/error.hpp"
#include "ddp/optim/optimizer.hpp"
#include "optim/capture.hpp"
#include "optim/gradient_scan.hpp"
#include "optim/on_device.hpp"
#include "optim/parameter_settings.hpp"
#include "optim/parameter_state.hpp"
#include "optim/step_checks.hpp"
#include "optim/stored_values.hpp"
#include "optim/tensor_groups.hpp"

namespace ddp {
namespace {

// The elements of the gradient that are stored, possibly undefined.
at::Tensor values_of(const NamedParameter& parameter) {
  const at::Tensor& grad = parameter.tensor.grad();
  return grad.defined() && grad.layout() != at::kStrided
             ? detail::stored_values(grad, "scan_gradients", parameter.name)
             : detail::checked_gradient(parameter.name, parameter.tensor);
}

// The `order`-norm of every gradient as one float64 tensor [parameters] on `device`; 0 for
// undefined and empty ones. Summed in float64 because the square of a gradient may overflow
// float32.
at::Tensor norms_of(const NamedParameters& parameters, double order, at::Device device) {
  const at::Tensor zero = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device));
  std::vector<at::Tensor> norms(parameters.size(), zero);
  std::vector<at::Tensor> gradients;
  std::vector<size_t> owners;  // by gradient
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor values = values_of(parameters[i]);
    if (values.defined() && values.numel() > 0) {
      gradients.push_back(values);
      owners.push_back(i);
    }
  }
  for (const detail::TensorGroup& group : detail::group_tensors(gradients)) {
    const std::vector<at::Tensor> found = at::_foreach_norm(group.tensors, order, at::kDouble);
    size_t next = 0;
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].device() == group.device && gradients[i].scalar_type() == group.dtype) {
        norms[owners[i]] = detail::on_device(found[next++], device);
      }
    }
  }
  return at::stack(norms);
}

}  // namespace

void detail::conclude_norm(GradientScan& scan, const at::Tensor& norm, double max_norm,
                           at::ScalarType dtype) {
  scan.norm = norm.to(dtype);
  scan.clip_factor = max_norm > 0.0
                         ? at::clamp_max(at::reciprocal(norm + 1e-6) * max_norm, 1.0).to(dtype)
                         : at::ones_like(norm, dtype);
}

GradientScan Optimizer::scan_gradients(const StepScalar& inverse_scale, double max_norm) {
  const at::NoGradGuard no_grad;
  const NamedParameters& parameters = named_parameters();
  if (parameters.empty()) {
    throw SettingsError("Optimizer::scan_gradients: the optimizer has no parameters");
  }
  const at::Device device = parameters.front().tensor.device();
  GradientScan scan;
  const bool wide = std::any_of(parameters.begin(), parameters.end(), [](const auto& parameter) {
    return parameter.tensor.scalar_type() == at::kDouble;
  });
  const at::ScalarType dtype = wide ? at::kDouble : at::kFloat;
  at::Tensor norm = at::linalg_vector_norm(norms_of(parameters, 2.0, device));
  if (inverse_scale.defined()) {
    norm = norm * detail::factor_tensor(inverse_scale, device, dtype).to(at::kDouble);
  }
  detail::conclude_norm(scan, norm, max_norm, dtype);
  // The largest magnitude is finite exactly if all are; NaN propagates.
  const at::Tensor bad = at::logical_not(
      at::isfinite(norms_of(parameters, std::numeric_limits<double>::infinity(), device)));
  const at::Tensor any = bad.any();
  scan.found_inf = any.to(at::kFloat);
  const at::Tensor first = at::argmax(bad.to(at::kInt)).to(at::kInt);
  scan.first_non_finite = at::where(any, first, at::full_like(first, -1));
  const at::Tensor& counts = non_finite_counts(device);
  counts.select(0, 0).add_(any);
  counts.select(0, 1).copy_(at::where(any, first, counts.select(0, 1)));
  return scan;
}

const at::Tensor& Optimizer::non_finite_counts(at::Device device) {
  if (!non_finite_counts_.defined()) {
    detail::refuse_to_make_while_capturing("the count of gradients that are not finite");
    non_finite_counts_ = at::zeros({2}, at::TensorOptions().dtype(at::kInt).device(device));
  }
  return non_finite_counts_;
}

NonFiniteReport Optimizer::non_finite_report() const {
  if (!non_finite_counts_.defined()) {
    return {};
  }
  const at::Tensor counts = non_finite_counts_.cpu();
  NonFiniteReport report{.num_scans = counts[0].item<int64_t>(), .parameter = ""};
  if (report.num_scans > 0) {
    report.parameter = named_parameters().at(counts[1].item<int>()).name;
  }
  return report;
}

}  // namespace ddp
