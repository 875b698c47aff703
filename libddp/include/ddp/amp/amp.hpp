// SPDX-License-Identifier: Apache-2.0
// Mixed precision: autocast and dynamic loss scaling, as torch.amp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ddp/core/fields.hpp"
#include "ddp/core/state_dict.hpp"
#include "ddp/detail/usage_mark.hpp"
#include "ddp/optim/optimizer.hpp"

namespace ddp {

enum class AmpDtype { Off, Bf16, Fp16 };  ///< autocast's compute dtype; Off: none
/// Auto: on with fp16 only, because bfloat16 has float32's range.
enum class GradScaling { Auto, On, Off };

/// The numbers are PyTorch's defaults.
struct AmpOptions {
  AmpDtype dtype = AmpDtype::Off;                ///< autocast's compute dtype
  GradScaling grad_scaling = GradScaling::Auto;  ///< whether GradScaler is enabled
  double init_scale = 65536.0;                   ///< > 0
  double growth_factor = 2.0;                    ///< > 1
  double backoff_factor = 0.5;                   ///< < 1
  int64_t growth_interval = 2000;  ///< >= 1; steps without inf or NaN until the scale grows
  detail::UsageMark usage{};  ///< not a setting: set when a library object receives these options
};
void describe_fields(AmpOptions& options, FieldVisitor& visitor);

/// As torch.autocast, on this thread, for CPU and CUDA tensors. AmpDtype::Off disables it in the
/// scope. Scopes nest. Run backward() after the scope.
class Autocast {
 public:
  explicit Autocast(const AmpOptions& options);  ///< with options.dtype
  explicit Autocast(AmpDtype dtype);             ///< until the object is destroyed
  ~Autocast();

 private:
  struct Saved;
  std::unique_ptr<const Saved> saved_;
};

/// Dynamic loss scaling with the state machine, defaults and errors of torch.amp.GradScaler.
///
///     scaler.scale(loss).backward();
///     scaler.unscale_(*optimizer);  // only to read or clip gradients; else step() does it
///     scaler.step(*optimizer, lr);
///     scaler.update();              // once, after all optimizers
///
/// To clip, prefer clip_and_step(), which reads the gradients once less and writes no gradient. It
/// clips by the norm of its optimizer's gradients alone. For one norm of several optimizers, call
/// unscale_() for each and then clip_grad_norm_(model, max_norm). A step is skipped per optimizer,
/// as in PyTorch: one with finite gradients still steps. A disabled scaler passes everything
/// through. All ranks decide alike, because the scaler checks reduced gradients. The host waits
/// only in get_scale(), state_dict(), and step() of an optimizer without device found_inf.
class GradScaler : public Stateful {
 public:
  /// Throws SettingsError for options out of range.
  explicit GradScaler(const AmpOptions& options = {});
  GradScaler(GradScaler&&) noexcept;
  ~GradScaler() override;

  at::Tensor scale(const at::Tensor& outputs);  ///< outputs * scale
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);
  /// Multiplies the gradients by 1 / scale and records whether one has inf or NaN.
  void unscale_(Optimizer& optimizer);
  /// Calls optimizer.step unless a gradient has inf or NaN.
  void step(Optimizer& optimizer, const StepScalars& scalars);
  void step(Optimizer& optimizer, StepScalar lr);
  void step(Optimizer& optimizer) { step(optimizer, StepScalars{}); }  ///< see Optimizer::step()

  /// Returns the unscaled norm before clipping. `max_norm` <= 0 only measures. `.grad` keeps what
  /// backward wrote (with zero1: undefined). With `skip_non_finite` a disabled scaler also skips a
  /// step with inf or NaN; without, it steps with any norm.
  GradientScan clip_and_step(Optimizer& optimizer, const StepScalars& scalars, double max_norm,
                             bool skip_non_finite = false);

  /// Lowers the scale if a check found inf or NaN; else raises it after each growth_interval.
  void update();
  void update(double new_scale);
  /// Forgets unscale_ and step since the last update(), after an exception.
  void reset_step();

  bool is_enabled() const;                         ///< false: every method passes its input through
  double get_scale() const;                        ///< the host waits; 1 if disabled
  double get_growth_factor() const;                ///< of the scale, after growth_interval steps
  double get_backoff_factor() const;               ///< of the scale, after inf or NaN
  int64_t get_growth_interval() const;             ///< steps without inf or NaN
  void set_growth_factor(double growth_factor);    ///< not checked; for later update()s
  void set_backoff_factor(double backoff_factor);  ///< not checked; for later update()s
  void set_growth_interval(int64_t growth_interval);  ///< not checked; for later update()s

  std::string state_name() const override { return "scaler"; }
  /// PyTorch's keys; empty if disabled. Call it after update(). A disabled scaler loads nothing.
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ddp
