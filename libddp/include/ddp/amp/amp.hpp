// SPDX-License-Identifier: Apache-2.0
// Mixed precision: autocast and dynamic loss scaling, as torch.amp.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ddp/core/fields.hpp"
#include "ddp/core/state_dict.hpp"
#include "ddp/detail/taken_mark.hpp"
#include "ddp/optim/optimizer.hpp"

namespace ddp {

enum class AmpDtype { Off, Bf16, Fp16 };

enum class GradScaling {
  Auto,  ///< on with fp16 only; bfloat16 has float32's range
  On,
  Off
};

/// Settings of Autocast and GradScaler; the numbers are PyTorch's defaults.
struct AmpOptions {
  AmpDtype dtype = AmpDtype::Off;                ///< autocast's compute dtype
  GradScaling grad_scaling = GradScaling::Auto;  ///< whether GradScaler is enabled
  double init_scale = 65536.0;                   ///< > 0
  double growth_factor = 2.0;                    ///< > 1
  double backoff_factor = 0.5;                   ///< < 1
  int64_t growth_interval = 2000;  ///< >= 1; steps without inf or NaN until the scale grows
  detail::TakenMark taken{};  ///< not a setting: reports to ddp::Config that these options are used
};
void describe_fields(AmpOptions& options, FieldVisitor& visitor);

/// Mixed precision for the forward passes in a scope, as torch.autocast: on this thread, for CPU
/// and CUDA tensors. AmpDtype::Off disables autocast in the scope. Scopes nest; the end of the
/// outermost one clears the cache of cast weights. Run backward() after the scope.
class Autocast {
 public:
  explicit Autocast(const AmpOptions& options);
  explicit Autocast(AmpDtype dtype);
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast();

 private:
  struct Saved {
    bool enabled;
    at::ScalarType dtype;
  };
  std::array<Saved, 2> saved_;  // CPU, CUDA
  bool saved_cache_enabled_;
};

/// Dynamic loss scaling with the state machine of torch.amp.GradScaler. It multiplies the loss by a
/// scale and divides the gradients by it, skips a step with inf or NaN in a gradient, and lowers or
/// raises the scale.
///
///     scaler.scale(loss).backward();
///     scaler.unscale_(*optimizer);  // only to read or clip gradients; else step() does it
///     scaler.step(*optimizer, lr);
///     scaler.update();              // once, after all optimizers
///
/// To clip, use clip_and_step, which does not write gradients if the optimizer scales them itself.
/// A disabled scaler (AmpOptions::grad_scaling) passes everything through. The scaler checks
/// reduced gradients, so all ranks decide alike. The host waits only in get_scale(), in
/// state_dict(), and in step() for an optimizer without found_inf on the device. Misuse throws
/// ddp::Error with PyTorch's words.
class GradScaler : public Stateful {
 public:
  /// Throws SettingsError for options out of range.
  explicit GradScaler(const AmpOptions& options = {});

  /// Returns outputs * scale. The first call makes the scale's tensors on the device of `outputs`.
  at::Tensor scale(const at::Tensor& outputs);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  /// Multiplies the gradients by 1 / scale and records whether one has inf or NaN.
  void unscale_(Optimizer& optimizer);

  /// Calls optimizer.step unless a gradient has inf or NaN. Unscales first if unscale_ was not
  /// called.
  void step(Optimizer& optimizer, const StepScalars& scalars);
  void step(Optimizer& optimizer, StepScalar lr);

  /// Combines unscale_, clip_grad_norm_ to `max_norm` (0 or less: only measured) and step. The
  /// contents of `.grad` are unspecified afterwards. A disabled scaler clips and steps with any
  /// norm; with `skip_non_finite` the step then changes nothing if a gradient has inf or NaN.
  /// Returns the norm of the unscaled gradients before clipping.
  GradientScan clip_and_step(Optimizer& optimizer, const StepScalars& scalars, double max_norm,
                             bool skip_non_finite = false);

  /// Lowers the scale if a check found inf or NaN; else raises it after each growth_interval.
  void update();
  void update(double new_scale);

  /// Clears unscale_ and step since the last update(), for use after an exception.
  void reset_step() { optimizer_states_.clear(); }

  bool is_enabled() const { return enabled_; }
  /// The host waits. 1 if disabled.
  double get_scale() const;
  double get_growth_factor() const { return growth_factor_; }
  double get_backoff_factor() const { return backoff_factor_; }
  int64_t get_growth_interval() const { return growth_interval_; }
  void set_growth_factor(double growth_factor) { growth_factor_ = growth_factor; }
  void set_backoff_factor(double backoff_factor) { backoff_factor_ = backoff_factor; }
  void set_growth_interval(int64_t growth_interval) { growth_interval_ = growth_interval; }

  /// For gradients that differ between ranks (shards, lossy hooks). `reduce` is called with each
  /// found_inf (0-dim float32) after a check and must set it to the maximum over the ranks.
  void set_found_inf_reduction(std::function<void(at::Tensor&)> reduce);

  std::string state_name() const override { return "scaler"; }
  /// PyTorch's keys; empty if disabled. Call it after update(). A disabled scaler loads nothing.
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 private:
  enum class Stage { Ready, Unscaled, Stepped };
  struct OptimizerState {
    Stage stage = Stage::Ready;
    std::vector<at::Tensor> found_infs;  // one per device with gradients
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
