// SPDX-License-Identifier: Apache-2.0
#include "ddp/amp/amp.hpp"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "amp/unscale.hpp"
#include "ddp/core/error.hpp"
#include "optim/capture.hpp"
#include "optim/state_check.hpp"
#include "optim/tensor_groups.hpp"
#include "optim/zero/sharded_gradients.hpp"

namespace ddp {
namespace detail {

void check_and_unscale_composed_(at::TensorList grads, at::Tensor& found_inf,
                                 const at::Tensor& inverse_scale) {
  // The largest magnitude is finite exactly if all are; NaN propagates.
  const auto largest = at::stack(at::_foreach_norm(grads, std::numeric_limits<double>::infinity()));
  found_inf.copy_(at::maximum(
      found_inf, at::isfinite(largest).all().logical_not().to(found_inf.scalar_type())));
  for (const at::Tensor& grad : grads) {
    grad.copy_(grad.to(at::kFloat).mul_(inverse_scale));
  }
}

void check_and_unscale_(at::TensorList grads, at::Tensor& found_inf,
                        const at::Tensor& inverse_scale) {
  // ATen has no CUDA kernel for bfloat16. bfloat16 needs no loss scale but may be used with one.
  if (grads.front().is_cuda() && grads.front().scalar_type() == at::kBFloat16) {
    check_and_unscale_composed_(grads, found_inf, inverse_scale);
  } else {
    at::_amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse_scale);
  }
}

}  // namespace detail

namespace {

template <typename T>
void require(bool condition, const char* setting, T value, const char* limit) {
  if (!condition) {
    throw SettingsError(concat("amp.", setting, " is ", value, ": must be ", limit));
  }
}

[[noreturn]] void fail(const std::string& message) {
  throw Error(ExitCode::UserException, "GradScaler: " + message);
}

// Whether any check found inf or NaN: 0 or 1 on `device`, without a host wait.
at::Tensor combine(const std::vector<at::Tensor>& found_infs, at::Device device) {
  at::Tensor combined = found_infs.front().to(device, /*non_blocking=*/true);
  for (size_t i = 1; i < found_infs.size(); ++i) {
    // The maximum, not PyTorch's sum: fused kernels skip only for exactly 1.
    combined = at::maximum(combined, found_infs[i].to(device, /*non_blocking=*/true));
  }
  return combined;
}

// The product of `given`, which may be absent, and `factor`.
StepScalar product(const StepScalar& given, const at::Tensor& factor) {
  return given.defined() ? factor * given.tensor(factor.device()) : factor;
}

void step_unless(const at::Tensor& found_inf, Optimizer& optimizer, StepScalars scalars) {
  if (optimizer.supports_found_inf()) {
    scalars.found_inf = found_inf;
    optimizer.step(scalars);
  } else if (found_inf.item<float>() == 0.0F) {
    optimizer.step(scalars);
  }
}

bool has_fp16(const std::vector<at::Tensor>& gradients) {
  return std::any_of(gradients.begin(), gradients.end(), [](const at::Tensor& gradient) {
    return gradient.scalar_type() == at::kHalf;
  });
}

}  // namespace

GradScaler::GradScaler(const AmpOptions& options)
    : enabled_(options.grad_scaling == GradScaling::On ||
               (options.grad_scaling == GradScaling::Auto && options.dtype == AmpDtype::Fp16)),
      init_scale_(options.init_scale),
      growth_factor_(options.growth_factor),
      backoff_factor_(options.backoff_factor),
      growth_interval_(options.growth_interval) {
  options.taken.set();
  require(init_scale_ > 0.0 && std::isfinite(init_scale_), "init_scale", init_scale_,
          "more than 0");
  require(growth_factor_ > 1.0, "growth_factor", growth_factor_, "more than 1");
  require(backoff_factor_ > 0.0 && backoff_factor_ < 1.0, "backoff_factor", backoff_factor_,
          "between 0 and 1");
  require(growth_interval_ >= 1, "growth_interval", growth_interval_, "1 or more");
}

void GradScaler::init_scale_on(at::Device device) {
  detail::refuse_to_make_while_capturing("the loss scale");
  const at::TensorOptions on_device = at::TensorOptions().device(device);
  scale_ = at::full({}, init_scale_, on_device.dtype(at::kFloat));
  growth_tracker_ = at::full({}, init_growth_tracker_, on_device.dtype(at::kInt));
}

at::Tensor GradScaler::scale(const at::Tensor& outputs) {
  if (!enabled_) {
    return outputs;
  }
  if (!scale_.defined()) {
    init_scale_on(outputs.device());
  }
  return outputs * scale_.to(outputs.device(), /*non_blocking=*/true);
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> scaled;
  for (const at::Tensor& output : outputs) {
    scaled.push_back(scale(output));
  }
  return scaled;
}

void GradScaler::check_scale_made(const char* function) const {
  if (!scale_.defined()) {
    fail(concat("attempted ", function,
                " but the scale is not made: scale(loss) was not called earlier"));
  }
}

std::vector<at::Tensor> GradScaler::check_and_unscale(Optimizer& optimizer,
                                                      const at::Tensor& inverse_scale,
                                                      bool allow_fp16) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads = optimizer.gradients();
  for (const at::Tensor& grad : grads) {
    if (!allow_fp16 && grad.scalar_type() == at::kHalf) {
      fail(
          "attempting to unscale FP16 gradients; train with float32 parameters under autocast, or "
          "leave out unscale_ and let the optimizer unscale in float32");
    }
    if (grad.layout() != at::kStrided) {
      fail("a gradient is sparse; use a dense layer");
    }
  }
  std::vector<at::Tensor> found_infs;
  for (const detail::TensorGroup& group : detail::group_tensors(grads)) {
    at::Tensor* found_inf = nullptr;
    for (at::Tensor& known : found_infs) {
      found_inf = known.device() == group.device ? &known : found_inf;
    }
    if (!found_inf) {
      const auto options = at::TensorOptions().dtype(at::kFloat).device(group.device);
      found_inf = &found_infs.emplace_back(at::zeros({}, options));
    }
    detail::check_and_unscale_(group.tensors, *found_inf,
                               inverse_scale.to(group.device, /*non_blocking=*/true));
  }
  auto* const sharded = dynamic_cast<detail::ShardedGradients*>(&optimizer);
  for (at::Tensor& found_inf : found_infs) {
    if (sharded) {
      sharded->agree_on_found_inf(found_inf);
    }
    if (reduce_found_inf_) {
      reduce_found_inf_(found_inf);
    }
  }
  return found_infs;
}

void GradScaler::unscale_(Optimizer& optimizer) {
  if (!enabled_) {
    return;
  }
  check_scale_made("unscale_");
  OptimizerState& state = optimizer_states_[&optimizer];
  if (state.stage == Stage::Unscaled) {
    fail("unscale_() has already been called on this optimizer since the last update()");
  }
  if (state.stage == Stage::Stepped) {
    fail("unscale_() is being called after step()");
  }
  state.found_infs = check_and_unscale(optimizer, inverse_scale(), /*allow_fp16=*/false);
  state.stage = Stage::Unscaled;
}

void GradScaler::step(Optimizer& optimizer, StepScalar lr) {
  step(optimizer, StepScalars{.lr = std::move(lr)});
}

void GradScaler::step(Optimizer& optimizer, const StepScalars& scalars) {
  if (!enabled_) {
    optimizer.step(scalars);
    return;
  }
  check_scale_made("step");
  OptimizerState& state = optimizer_states_[&optimizer];
  if (state.stage == Stage::Stepped) {
    fail("step() has already been called since the last update()");
  }
  StepScalars given = scalars;
  if (state.stage == Stage::Ready) {
    // Only scan the gradients. Unscaling in place would lose bits of fp16 gradients, and is wasted
    // if the optimizer multiplies gradients anyway.
    if (optimizer.supports_found_inf() &&
        (optimizer.scales_gradients_in_step() || has_fp16(optimizer.gradients()))) {
      scan(optimizer, state, given, /*max_norm=*/0.0);
    } else {
      unscale_(optimizer);
    }
  }
  finish_step(optimizer, state, std::move(given));
}

GradientScan GradScaler::clip_and_step(Optimizer& optimizer, const StepScalars& scalars,
                                       double max_norm, bool skip_non_finite) {
  StepScalars given = scalars;
  if (!enabled_) {
    GradientScan found = optimizer.scan_gradients(scalars.inverse_scale, max_norm);
    given.clip_factor = product(scalars.clip_factor, found.clip_factor);
    if (!skip_non_finite) {
      optimizer.step(given);
      return found;
    }
    if (reduce_found_inf_) {
      reduce_found_inf_(found.found_inf);
    }
    step_unless(found.found_inf, optimizer, std::move(given));
    return found;
  }
  check_scale_made("clip_and_step");
  OptimizerState& state = optimizer_states_[&optimizer];
  if (state.stage != Stage::Ready) {
    fail(concat("clip_and_step() is being called after ",
                state.stage == Stage::Unscaled ? "unscale_()" : "step()",
                " and before update(): it does both itself"));
  }
  GradientScan found = scan(optimizer, state, given, max_norm);
  finish_step(optimizer, state, std::move(given));
  return found;
}

// Scans unmodified gradients; the step unscales and clips them.
GradientScan GradScaler::scan(Optimizer& optimizer, OptimizerState& state, StepScalars& scalars,
                              double max_norm) {
  const at::NoGradGuard no_grad;
  if (optimizer.gradients().empty()) {
    return {};  // finish_step reports this
  }
  scalars.inverse_scale = product(scalars.inverse_scale, inverse_scale());
  GradientScan found = optimizer.scan_gradients(scalars.inverse_scale, max_norm);
  scalars.clip_factor = product(scalars.clip_factor, found.clip_factor);
  state.found_infs = {found.found_inf};
  if (reduce_found_inf_) {
    reduce_found_inf_(state.found_infs.front());
  }
  return found;
}

void GradScaler::finish_step(Optimizer& optimizer, OptimizerState& state, StepScalars scalars) {
  if (state.found_infs.empty()) {
    fail("no inf checks were recorded for this optimizer: it has no gradients");
  }
  step_unless(combine(state.found_infs, scale_.device()), optimizer, std::move(scalars));
  state.stage = Stage::Stepped;
}

// In double: a float32 reciprocal is imprecise under some compilers' options.
at::Tensor GradScaler::inverse_scale() const {
  return scale_.to(at::kDouble).reciprocal().to(at::kFloat);
}

void GradScaler::update() {
  if (!enabled_) {
    return;
  }
  check_scale_made("update");
  std::vector<at::Tensor> found_infs;
  for (const auto& [optimizer, state] : optimizer_states_) {
    found_infs.insert(found_infs.end(), state.found_infs.begin(), state.found_infs.end());
  }
  if (found_infs.empty()) {
    fail("no inf checks were recorded prior to update()");
  }
  at::_amp_update_scale_(scale_, growth_tracker_, combine(found_infs, scale_.device()),
                         growth_factor_, backoff_factor_, growth_interval_);
  optimizer_states_.clear();
}

void GradScaler::update(double new_scale) {
  if (!enabled_) {
    return;
  }
  check_scale_made("update");
  scale_.fill_(new_scale);
  optimizer_states_.clear();
}

double GradScaler::get_scale() const {
  if (!enabled_) {
    return 1.0;
  }
  return scale_.defined() ? scale_.item<double>() : init_scale_;
}

int64_t GradScaler::growth_tracker() const {
  return growth_tracker_.defined() ? growth_tracker_.item<int64_t>() : init_growth_tracker_;
}

void GradScaler::set_found_inf_reduction(std::function<void(at::Tensor&)> reduce) {
  reduce_found_inf_ = std::move(reduce);
}

StateDict GradScaler::state_dict() const {
  StateDict state;
  if (enabled_) {
    state.values = {{"scale", get_scale()},
                    {"growth_factor", growth_factor_},
                    {"backoff_factor", backoff_factor_},
                    {"growth_interval", growth_interval_},
                    {"_growth_tracker", growth_tracker()}};
  }
  return state;
}

void GradScaler::load_state_dict(const StateDict& state) {
  if (!enabled_) {
    return;
  }
  if (state.values.empty()) {
    throw MismatchError(
        "state of scaler: it is empty, possibly saved with gradient scaling off; set "
        "amp.grad_scaling=off or start without it");
  }
  detail::StateCheck check(state, state_name());
  const auto scale = check.get<double>("scale");
  const auto growth_factor = check.get<double>("growth_factor");
  const auto backoff_factor = check.get<double>("backoff_factor");
  const auto growth_interval = check.get<int64_t>("growth_interval");
  const auto growth_tracker = check.get<int64_t>("_growth_tracker");
  check.nothing_else();
  init_scale_ = scale;
  growth_factor_ = growth_factor;
  backoff_factor_ = backoff_factor;
  growth_interval_ = growth_interval;
  init_growth_tracker_ = growth_tracker;
  if (scale_.defined()) {
    scale_.fill_(init_scale_);
    growth_tracker_.fill_(init_growth_tracker_);
  }
}

}  // namespace ddp
