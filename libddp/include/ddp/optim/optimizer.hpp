// SPDX-License-Identifier: Apache-2.0
// The interface of every optimizer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "ddp/core/state_dict.hpp"
#include "ddp/detail/step_scalar.hpp"

namespace ddp {
namespace detail {
class NoRate;  // nothing converts to it
}

/// The inputs of one optimizer step: each is absent, a double or a 0-dim float32 tensor. A captured
/// step takes tensors.
struct StepScalars {
  StepScalar lr = {};    ///< before each group's lr_scale; float32 (float64 parameters: a double)
  StepScalar step = {};  ///< index of the training step, for rules that draw random numbers
  StepScalar inverse_scale = {};  ///< multiplied into the gradients first: 1 / loss scale
  StepScalar found_inf = {};    ///< 0 or 1; 1: the step changes nothing (parameters, state, counts)
  StepScalar clip_factor = {};  ///< multiplied into the gradients: min(1, max_norm / norm)
};

/// Results of one pass over an optimizer's gradients, on their device. Norm and factor of float64
/// weights are float64.
struct GradientScan {
  at::Tensor norm;         ///< 0-dim, float32 or float64, the 2-norm of all gradients as one vector
  at::Tensor found_inf;    ///< 0-dim float32, 1 if an element is inf or NaN, else 0
  at::Tensor clip_factor;  ///< 0-dim, float32 or float64, min(1, max_norm / (norm + 1e-6)) or 1
  at::Tensor first_non_finite;  ///< 0-dim int32, index into named_parameters() of the first
                                ///< gradient with inf or NaN, or -1
};

/// Non-finite gradients found by an optimizer's scans so far.
struct NonFiniteReport {
  int64_t num_scans = 0;  ///< scans that found inf or NaN
  std::string parameter;  ///< the first parameter with such a gradient in the last of these scans
};

/// Updates parameters from their `.grad`. A step never makes the host wait for the device unless a
/// class documents it. As in PyTorch, parameters with undefined `.grad` are skipped, and so is
/// their state. A step writes no gradient, but one with zero1 leaves them undefined. A backward
/// through the weights from before a step throws, unless a CUDA graph replayed that step.
class Optimizer : public Stateful {
 public:
  /// Applies the gradients. For models that this thread wrapped: throws MismatchError if the last
  /// backward left parameters without a gradient, and SettingsError for sums of weighted_backward()
  /// under no_sync() that no synchronised backward followed.
  virtual void step(const StepScalars& scalars) = 0;
  void step(double lr) { step(StepScalars{.lr = lr}); }       ///< with this learning rate
  void step(std::initializer_list<detail::NoRate>) = delete;  ///< step({}) would be a rate of 0
  /// With the groups' own rates, as in torch::optim. Optimizers of make_optimizer() store no rate
  /// and throw SettingsError.
  void step() { step(StepScalars{}); }

  virtual const NamedParameters& named_parameters() const = 0;  ///< that it updates
  /// The defined gradients that the next step reads: a GradScaler unscales and checks them.
  virtual std::vector<at::Tensor> gradients() const;

  /// Measures gradients * inverse_scale and finds inf and NaN in the gradients, for the found_inf
  /// and clip_factor of a step. `max_norm` <= 0 does not limit. Changes no gradient; the host does
  /// not wait. The first call must not be captured; later ones may be.
  virtual GradientScan scan_gradients(const StepScalar& inverse_scale = {}, double max_norm = 0.0);
  /// The findings of the scans so far, for a message some steps later. The host waits.
  NonFiniteReport non_finite_report() const;
  /// True if step() multiplies gradients by inverse_scale and clip_factor at no cost. Then callers
  /// should not rewrite the gradients.
  virtual bool scales_gradients_in_step() const { return false; }
  virtual bool supports_found_inf() const = 0;  ///< on the device: the host need not read it
  virtual bool capturable() const = 0;          ///< a CUDA graph may capture step()

  void zero_grad();  ///< makes every `.grad` undefined; writes no memory
  /// The state that all ranks have in common, for ddp.desync_check_every. Only whole tensors count.
  virtual StateDict replicated_state() const { return state_dict(); }
  std::string state_name() const override { return "optimizer"; }
  /// Changes when step() must be captured again: after state was loaded or moved with parameters.
  int64_t capture_version() const { return capture_version_; }

 protected:
  /// Call at the start of step(). Throws MismatchError or SettingsError if a wrapped model of this
  /// thread has gradients of these parameters that no backward averaged, and MismatchError if
  /// ddp.desync_check_every found different replicas.
  void require_means();
  /// int32 [2] on `device`, made by the first call: the number of scans with findings, and the
  /// index of the first such parameter in the last of them.
  const at::Tensor& non_finite_counts(at::Device device);

  int64_t capture_version_ = 0;  ///< see capture_version()

 private:
  at::Tensor non_finite_counts_;
  int64_t num_watched_steps_ = 0;  // of models with ddp.desync_check_every
};

}  // namespace ddp
