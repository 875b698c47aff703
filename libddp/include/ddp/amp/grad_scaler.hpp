// SPDX-License-Identifier: Apache-2.0
// Dynamic loss scaling with the state machine of torch.amp.GradScaler (torch/amp/grad_scaler.py).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ddp/amp/amp_options.hpp"
#include "ddp/core/state_dict.hpp"
#include "ddp/optim/optimizer.hpp"

namespace ddp {

/// Keeps small fp16 gradients from vanishing: multiplies the loss by a scale, divides the gradients
/// by it, skips the step where one of them is inf or NaN, and lowers or raises the scale.
///
///     scaler.scale(loss).backward();
///     scaler.unscale_(optimizer);   // only to look at gradients or clip them, else step does it
///     scaler.step(optimizer, lr);
///     scaler.update();              // once, after all optimizers
///
/// With clipping, clip_and_step instead of unscale_, clip_grad_norm_ and step reads the gradients
/// once more and writes them never, where the optimizer can multiply them on its way
/// (Optimizer::scales_gradients_in_step).
///
/// Not enabled (AmpOptions::grad_scaling) it passes everything through. The decision is made on
/// reduced gradients, so every rank that all-reduces them decides alike. The host waits only in
/// step() for an optimizer that cannot take found_inf on the device, in get_scale() and in
/// state_dict().
///
/// Misuse (unscale_ twice, step twice, unscale_ after step, update without a check, fp16 gradients
/// in unscale_) throws ddp::Error with PyTorch's words.
class GradScaler : public Stateful {
 public:
  /// Throws SettingsError where growth_factor <= 1, backoff_factor >= 1, growth_interval < 1 or
  /// init_scale <= 0.
  explicit GradScaler(const AmpOptions& options = {});

  /// outputs * scale. The first call makes the scale's tensors on the device of `outputs`.
  at::Tensor scale(const at::Tensor& outputs);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  /// Multiplies the optimizer's gradients by 1 / scale and records whether one is inf or NaN.
  void unscale_(Optimizer& optimizer);

  /// optimizer.step, unless a gradient is inf or NaN; unscales first where unscale_ was not called.
  /// In a captured step the learning rate is a device tensor in `scalars`.
  void step(Optimizer& optimizer, const StepScalars& scalars);
  void step(Optimizer& optimizer, StepScalar lr);

  /// unscale_, clip_grad_norm_ to `max_norm` (0 or less: only measured) and step in one. What
  /// `.grad` holds afterwards is unspecified. Not enabled, it clips and steps, whatever the norm
  /// is; with `skip_non_finite` the step then changes nothing where a gradient is inf or NaN. The
  /// result's norm is that of the unscaled gradients before clipping.
  GradientScan clip_and_step(Optimizer& optimizer, const StepScalars& scalars, double max_norm,
                             bool skip_non_finite = false);

  /// Lowers the scale where a check found inf or NaN, else counts and raises it at the interval.
  void update();
  /// Sets the scale.
  void update(double new_scale);

  /// Forgets unscale_ and step since the last update(): after an exception between them.
  void reset_step() { optimizer_states_.clear(); }

  bool is_enabled() const { return enabled_; }
  /// Host waits. 1 where not enabled.
  double get_scale() const;
  double get_growth_factor() const { return growth_factor_; }
  double get_backoff_factor() const { return backoff_factor_; }
  int64_t get_growth_interval() const { return growth_interval_; }
  void set_growth_factor(double growth_factor) { growth_factor_ = growth_factor; }
  void set_backoff_factor(double backoff_factor) { backoff_factor_ = backoff_factor; }
  void set_growth_interval(int64_t growth_interval) { growth_interval_ = growth_interval; }

  /// For gradients that differ between ranks (shards, lossy hooks): called with each found_inf
  /// (0-dim float32) after a check; must leave the maximum over the ranks in it.
  void set_found_inf_reduction(std::function<void(at::Tensor&)> reduce);

  std::string state_name() const override { return "scaler"; }
  /// PyTorch's keys: scale, growth_factor, backoff_factor, growth_interval, _growth_tracker. Empty
  /// where not enabled. Call it after update().
  StateDict state_dict() const override;
  /// Does nothing where not enabled.
  void load_state_dict(const StateDict& state) override;

 private:
  enum class Stage { Ready, Unscaled, Stepped };
  struct OptimizerState {
    Stage stage = Stage::Ready;
    std::vector<at::Tensor> found_infs;  // one for each device with gradients
  };

  void init_scale_on(at::Device device);
  void check_scale_made(const char* function) const;
  std::vector<at::Tensor> check_and_unscale(Optimizer& optimizer, const at::Tensor& inverse_scale,
                                            bool allow_fp16);
  GradientScan scan(Optimizer& optimizer, OptimizerState& state, StepScalars& scalars,
                    double max_norm);
  void finish_step(Optimizer& optimizer, OptimizerState& state, StepScalars scalars);
  at::Tensor inverse_scale() const;
  int64_t growth_tracker() const;

  bool enabled_;
  double init_scale_;
  double growth_factor_;
  double backoff_factor_;
  int64_t growth_interval_;
  int64_t init_growth_tracker_ = 0;
  at::Tensor scale_;           // 0-dim float32
  at::Tensor growth_tracker_;  // 0-dim int32
  std::map<const Optimizer*, OptimizerState> optimizer_states_;
  std::function<void(at::Tensor&)> reduce_found_inf_;
};

}  // namespace ddp
