// SPDX-License-Identifier: Apache-2.0
#include "ddp/amp/amp.hpp"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <utility>

#include "amp/unscale.hpp"
#include "ddp/core/error.hpp"
#include "optim/capture.hpp"
#include "optim/on_device.hpp"
#include "optim/state_check.hpp"
#include "optim/tensor_groups.hpp"
#include "optim/zero/sharded_gradients.hpp"
#include "reduce/hooks/loss_scale.hpp"

namespace ddp {
namespace detail {

void check_and_unscale_composed_(at::TensorList grads, at::Tensor& found_inf,
                                 const at::Tensor& inverse_scale) {
  // The largest magnitude is finite exactly if all are; NaN propagates.
  std::vector<at::Tensor> full;  // an empty tensor has no largest magnitude
  std::copy_if(grads.begin(), grads.end(), std::back_inserter(full),
               [](const at::Tensor& grad) { return grad.numel() > 0; });
  if (full.empty()) {
    return;
  }
  const auto largest = at::stack(at::_foreach_norm(full, std::numeric_limits<double>::infinity()));
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

[[noreturn]] void refuse_fp16(const char* other_fix) {
  fail(concat(
      "attempting to unscale FP16 gradients; train with float32 parameters under autocast, or ",
      other_fix));
}

// Whether any check found inf or NaN: 0 or 1 on `device`, without a host wait.
at::Tensor combine(const std::vector<at::Tensor>& found_infs, at::Device device) {
  at::Tensor combined = detail::on_device(found_infs.front(), device);
  for (size_t i = 1; i < found_infs.size(); ++i) {
    // The maximum, not PyTorch's sum: fused kernels skip only for exactly 1.
    combined = at::maximum(combined, detail::on_device(found_infs[i], device));
  }
  return combined;
}

// The product of `given`, which may be absent, and `factor`.
StepScalar product(const StepScalar& given, const at::Tensor& factor) {
  if (given.value()) {
    return factor * *given.value();
  }
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

enum class Stage { Ready, Unscaled, Stepped };

struct OptimizerState {
  Stage stage = Stage::Ready;
  std::vector<at::Tensor> found_infs;  // one per device with gradients
};

}  // namespace

struct GradScaler::State {
  explicit State(const AmpOptions& options);

  void init_scale_on(at::Device device);
  void check_scale_made(const char* function) const;
  std::vector<at::Tensor> check_and_unscale(Optimizer& optimizer) const;
  GradientScan scan(Optimizer& optimizer, OptimizerState& state, StepScalars& scalars,
                    double max_norm) const;
  void finish_step(Optimizer& optimizer, OptimizerState& state, StepScalars scalars) const;
  at::Tensor inverse_scale() const;
  int64_t read_growth_tracker() const;

  const bool enabled;
  double init_scale;
  double growth_factor;
  double backoff_factor;
  int64_t growth_interval;
  int64_t init_growth_tracker = 0;
  at::Tensor scale;           // 0-dim float32
  at::Tensor growth_tracker;  // 0-dim int32
  std::map<const Optimizer*, OptimizerState> optimizers;
};

GradScaler::State::State(const AmpOptions& options)
    : enabled(options.grad_scaling == GradScaling::On ||
              (options.grad_scaling == GradScaling::Auto && options.dtype == AmpDtype::Fp16)),
      init_scale(options.init_scale),
      growth_factor(options.growth_factor),
      backoff_factor(options.backoff_factor),
      growth_interval(options.growth_interval) {
  options.usage.set();
  require(init_scale > 0.0 && std::isfinite(init_scale), "init_scale", init_scale, "more than 0");
  require(growth_factor > 1.0, "growth_factor", growth_factor, "more than 1");
  require(backoff_factor > 0.0 && backoff_factor < 1.0, "backoff_factor", backoff_factor,
          "between 0 and 1");
  require(growth_interval >= 1, "growth_interval", growth_interval, "1 or more");
}

GradScaler::GradScaler(const AmpOptions& options) : state_(std::make_unique<State>(options)) {}
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler::~GradScaler() = default;

void GradScaler::State::init_scale_on(at::Device device) {
  detail::refuse_to_make_while_capturing("the loss scale");
  const at::TensorOptions on_device = at::TensorOptions().device(device);
  scale = at::full({}, init_scale, on_device.dtype(at::kFloat));
  growth_tracker = at::full({}, init_growth_tracker, on_device.dtype(at::kInt));
}

at::Tensor GradScaler::scale(const at::Tensor& outputs) {
  if (!state_->enabled) {
    return outputs;
  }
  if (!state_->scale.defined()) {
    state_->init_scale_on(outputs.device());
  }
  const at::Tensor factor = detail::on_device(state_->scale, outputs.device());
  at::Tensor scaled = outputs * factor;
  detail::set_loss_scale(scaled, factor);
  return scaled;
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> scaled;
  for (const at::Tensor& output : outputs) {
    scaled.push_back(scale(output));
  }
  return scaled;
}

void GradScaler::State::check_scale_made(const char* function) const {
  if (!scale.defined()) {
    fail(concat("attempted ", function,
                " but the scale is not made: scale(loss) was not called earlier"));
  }
}

std::vector<at::Tensor> GradScaler::State::check_and_unscale(Optimizer& optimizer) const {
  const at::NoGradGuard no_grad;
  const at::Tensor factor = inverse_scale();
  std::vector<at::Tensor> grads = optimizer.gradients();
  for (at::Tensor& grad : grads) {
    if (grad.scalar_type() == at::kHalf) {
      refuse_fp16("leave out unscale_ and let the optimizer unscale in float32");
    }
    grad = grad.layout() == at::kStrided ? grad : grad._values();
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
    detail::check_and_unscale_(group.tensors, *found_inf, detail::on_device(factor, group.device));
  }
  auto* const sharded = dynamic_cast<detail::ShardedGradients*>(&optimizer);
  if (sharded) {
    for (at::Tensor& found_inf : found_infs) {
      sharded->agree_on_found_inf(found_inf);
    }
  }
  return found_infs;
}

void GradScaler::unscale_(Optimizer& optimizer) {
  if (!state_->enabled) {
    return;
  }
  state_->check_scale_made("unscale_");
  OptimizerState& state = state_->optimizers[&optimizer];
  if (state.stage == Stage::Unscaled) {
    fail("unscale_() has already been called on this optimizer since the last update()");
  }
  if (state.stage == Stage::Stepped) {
    fail("unscale_() is being called after step()");
  }
  state.found_infs = state_->check_and_unscale(optimizer);
  state.stage = Stage::Unscaled;
}

void GradScaler::step(Optimizer& optimizer, StepScalar lr) {
  step(optimizer, StepScalars{.lr = std::move(lr)});
}

void GradScaler::step(Optimizer& optimizer, const StepScalars& scalars) {
  if (!state_->enabled) {
    optimizer.step(scalars);
    return;
  }
  state_->check_scale_made("step");
  OptimizerState& state = state_->optimizers[&optimizer];
  if (state.stage == Stage::Stepped) {
    fail("step() has already been called since the last update()");
  }
  StepScalars given = scalars;
  if (state.stage == Stage::Ready) {
    // Only scan the gradients. Unscaling in place would lose bits of fp16 gradients, and is wasted
    // if the optimizer multiplies gradients anyway.
    if (optimizer.supports_found_inf() &&
        (optimizer.scales_gradients_in_step() || has_fp16(optimizer.gradients()))) {
      state_->scan(optimizer, state, given, /*max_norm=*/0.0);
    } else {
      unscale_(optimizer);
    }
  }
  state_->finish_step(optimizer, state, std::move(given));
}

GradientScan GradScaler::clip_and_step(Optimizer& optimizer, const StepScalars& scalars,
                                       double max_norm, bool skip_non_finite) {
  StepScalars given = scalars;
  if (!state_->enabled) {
    GradientScan found = optimizer.scan_gradients(scalars.inverse_scale, max_norm);
    given.clip_factor = product(scalars.clip_factor, found.clip_factor);
    if (!skip_non_finite) {
      optimizer.step(given);
      return found;
    }
    step_unless(found.found_inf, optimizer, std::move(given));
    return found;
  }
  state_->check_scale_made("clip_and_step");
  OptimizerState& state = state_->optimizers[&optimizer];
  if (state.stage != Stage::Ready) {
    fail(concat("clip_and_step() is being called after ",
                state.stage == Stage::Unscaled ? "unscale_()" : "step()",
                " and before update(): it does both itself"));
  }
  // A wrapped optimizer gets gradients that are multiplied in their own dtype.
  if (!optimizer.supports_found_inf() && has_fp16(optimizer.gradients())) {
    refuse_fp16("use an optimizer of libddp, which unscales in float32");
  }
  GradientScan found = state_->scan(optimizer, state, given, max_norm);
  state_->finish_step(optimizer, state, std::move(given));
  return found;
}

// Scans unmodified gradients; the step unscales and clips them.
GradientScan GradScaler::State::scan(Optimizer& optimizer, OptimizerState& state,
                                     StepScalars& scalars, double max_norm) const {
  const at::NoGradGuard no_grad;
  if (optimizer.gradients().empty()) {
    return {};  // finish_step reports this
  }
  scalars.inverse_scale = product(scalars.inverse_scale, inverse_scale());
  GradientScan found = optimizer.scan_gradients(scalars.inverse_scale, max_norm);
  scalars.clip_factor = product(scalars.clip_factor, found.clip_factor);
  state.found_infs = {found.found_inf};
  return found;
}

void GradScaler::State::finish_step(Optimizer& optimizer, OptimizerState& state,
                                    StepScalars scalars) const {
  if (state.found_infs.empty()) {
    fail("no inf checks were recorded for this optimizer: it has no gradients");
  }
  step_unless(combine(state.found_infs, scale.device()), optimizer, std::move(scalars));
  state.stage = Stage::Stepped;
}

// In double: a float32 reciprocal is imprecise under some compilers' options.
at::Tensor GradScaler::State::inverse_scale() const {
  return scale.to(at::kDouble).reciprocal().to(at::kFloat);
}

void GradScaler::update() {
  if (!state_->enabled) {
    return;
  }
  state_->check_scale_made("update");
  std::vector<at::Tensor> found_infs;
  for (const auto& [optimizer, state] : state_->optimizers) {
    found_infs.insert(found_infs.end(), state.found_infs.begin(), state.found_infs.end());
  }
  if (found_infs.empty()) {
    fail("no inf checks were recorded prior to update()");
  }
  at::Tensor& scale = state_->scale;
  at::_amp_update_scale_(scale, state_->growth_tracker, combine(found_infs, scale.device()),
                         state_->growth_factor, state_->backoff_factor, state_->growth_interval);
  state_->optimizers.clear();
}

void GradScaler::update(double new_scale) {
  if (!state_->enabled) {
    return;
  }
  state_->check_scale_made("update");
  state_->scale.fill_(new_scale);
  state_->optimizers.clear();
}

double GradScaler::get_scale() const {
  if (!state_->enabled) {
    return 1.0;
  }
  return state_->scale.defined() ? state_->scale.item<double>() : state_->init_scale;
}

int64_t GradScaler::State::read_growth_tracker() const {
  return growth_tracker.defined() ? growth_tracker.item<int64_t>() : init_growth_tracker;
}

void GradScaler::reset_step() {
  state_->optimizers.clear();
}

bool GradScaler::is_enabled() const {
  return state_->enabled;
}
double GradScaler::get_growth_factor() const {
  return state_->growth_factor;
}
double GradScaler::get_backoff_factor() const {
  return state_->backoff_factor;
}
int64_t GradScaler::get_growth_interval() const {
  return state_->growth_interval;
}
void GradScaler::set_growth_factor(double growth_factor) {
  state_->growth_factor = growth_factor;
}
void GradScaler::set_backoff_factor(double backoff_factor) {
  state_->backoff_factor = backoff_factor;
}
void GradScaler::set_growth_interval(int64_t growth_interval) {
  state_->growth_interval = growth_interval;
}

StateDict GradScaler::state_dict() const {
  StateDict state;
  if (is_enabled()) {
    state.values = {{"scale", get_scale()},
                    {"growth_factor", get_growth_factor()},
                    {"backoff_factor", get_backoff_factor()},
                    {"growth_interval", get_growth_interval()},
                    {"_growth_tracker", state_->read_growth_tracker()}};
  }
  return state;
}

void GradScaler::load_state_dict(const StateDict& state) {
  if (!state_->enabled) {
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
  state_->init_scale = scale;
  state_->growth_factor = growth_factor;
  state_->backoff_factor = backoff_factor;
  state_->growth_interval = growth_interval;
  state_->init_growth_tracker = growth_tracker;
  if (state_->scale.defined()) {
    state_->scale.fill_(scale);
    state_->growth_tracker.fill_(growth_tracker);
  }
}

}  // namespace ddp
