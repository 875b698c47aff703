// SPDX-License-Identifier: Apache-2.0
// What every optimizer of libddp can do, whatever stores its state: lists of tensors, flat memory,
// shards of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/core/state_dict.hpp"
#include "ddp/reduce/named_parameter.hpp"

namespace ddp {

/// A number a step needs: known on the host (eager steps), or a 0-dim float32 tensor on the device
/// (captured steps, where only the device knows it). Default-constructed it is absent.
class StepScalar {
 public:
  StepScalar() = default;
  StepScalar(double value) : value_(value) {}  // NOLINT(google-explicit-constructor)
  StepScalar(at::Tensor tensor)
      : tensor_(std::move(tensor)) {}  // NOLINT(google-explicit-constructor)

  bool defined() const { return value_.has_value() || tensor_.defined(); }
  /// The host's copy, where the host knows it.
  const std::optional<double>& value() const { return value_; }
  /// The number as a 0-dim float32 tensor on `device`. Never waits for a device; must not be called
  /// where !defined().
  at::Tensor tensor(at::Device device) const;

 private:
  std::optional<double> value_;
  at::Tensor tensor_;
};

/// The inputs of one optimizer step. Every number may be given by the host or by the device; a
/// captured step takes them all from the device.
struct StepScalars {
  StepScalar lr = {};    ///< learning rate, before each group's lr_scale; rounded to float32, but
                         ///< not for float64 parameters on the CPU where it is the host's
  StepScalar step = {};  ///< index of the training step, for rules that draw random numbers
  StepScalar inverse_scale = {};  ///< gradients are multiplied by it first: 1 / loss scale
  StepScalar found_inf = {};      ///< 0, or 1: the step changes nothing (parameters, state, counts)
  StepScalar clip_factor = {};    ///< gradients are multiplied by it: min(1, max_norm / norm)
};

/// What one pass over an optimizer's gradients finds, on their device.
struct GradientScan {
  at::Tensor norm;         ///< 0-dim float32, the 2-norm of all gradients as one vector
  at::Tensor found_inf;    ///< 0-dim float32, 1 where an element is inf or NaN, else 0
  at::Tensor clip_factor;  ///< 0-dim float32, min(1, max_norm / (norm + 1e-6)) or, unlimited, 1
  at::Tensor first_non_finite;  ///< 0-dim int32, index into named_parameters() of the first
                                ///< gradient with inf or NaN, or -1
};

/// What the scans of an optimizer found so far.
struct NonFiniteReport {
  int64_t num_scans = 0;  ///< that found inf or NaN
  std::string parameter;  ///< whose gradient was the first such one in the last of them
};

/// Updates parameters from their `.grad`.
///
/// A step never makes the host wait for the device unless a class says so. Parameters whose `.grad`
/// is undefined are skipped, and so is their state, as in PyTorch. Where inverse_scale or
/// clip_factor is given, the contents of `.grad` after the step are unspecified.
class Optimizer : public Stateful {
 public:
  virtual void step(const StepScalars& scalars) = 0;
  /// step with a learning rate that the host knows.
  void step(double lr) { step(StepScalars{.lr = lr}); }

  /// The parameters it updates.
  virtual const NamedParameters& named_parameters() const = 0;
  /// The defined gradients it reads in its next step: what a GradScaler unscales and checks.
  virtual std::vector<at::Tensor> gradients() const;

  /// Measures gradients * inverse_scale and finds inf and NaN (in the gradients as they are), for
  /// the found_inf and clip_factor of a step. `max_norm` <= 0 does not limit. Gradients are not
  /// changed; the host does not wait; the first call may not be captured, later ones may.
  virtual GradientScan scan_gradients(const StepScalar& inverse_scale = {}, double max_norm = 0.0);
  /// Names what scans found: for a message some steps later. The host waits.
  virtual NonFiniteReport non_finite_report() const;
  /// Whether its step multiplies gradients by inverse_scale and clip_factor at no cost, so that
  /// nobody should rewrite gradients before it.
  virtual bool scales_gradients_in_step() const { return false; }

  /// Where gradients() are another part of all gradients on each rank: makes `found_inf`, 0 or 1
  /// for this rank's, that of all. Collective there; does nothing elsewhere.
  virtual void agree_on_found_inf(at::Tensor& /*found_inf*/) {}

  /// Whether `found_inf` on the device makes it skip: no host has to look.
  virtual bool supports_found_inf() const = 0;
  /// Whether a CUDA graph may capture its step.
  virtual bool capturable() const = 0;

  /// Grows where state is loaded, or follows parameters to other memory: what was captured of its
  /// step before may work on other state.
  virtual int64_t num_changes() const { return num_changes_; }

  /// Leaves every `.grad` undefined: no memory is written.
  void zero_grad();

  /// "optimizer"; programs with several optimizers give the others names of their own.
  std::string state_name() const override { return "optimizer"; }

 protected:
  /// int32 [2] on `device`, made by the first call: scans that found something, and the index of
  /// the last one's first parameter.
  const at::Tensor& non_finite_counts(at::Device device);

  int64_t num_changes_ = 0;

 private:
  at::Tensor non_finite_counts_;
};

/// An optimizer of any kind as a value: what make_optimizer returns. Moves, does not copy.
class AnyOptimizer final : public Optimizer {
 public:
  explicit AnyOptimizer(std::unique_ptr<Optimizer> optimizer) : optimizer_(std::move(optimizer)) {}

  using Optimizer::step;
  void step(const StepScalars& scalars) override { optimizer_->step(scalars); }
  const NamedParameters& named_parameters() const override {
    return optimizer_->named_parameters();
  }
  std::vector<at::Tensor> gradients() const override { return optimizer_->gradients(); }
  GradientScan scan_gradients(const StepScalar& inverse_scale = {},
                              double max_norm = 0.0) override {
    return optimizer_->scan_gradients(inverse_scale, max_norm);
  }
  NonFiniteReport non_finite_report() const override { return optimizer_->non_finite_report(); }
  bool scales_gradients_in_step() const override { return optimizer_->scales_gradients_in_step(); }
  void agree_on_found_inf(at::Tensor& found_inf) override {
    optimizer_->agree_on_found_inf(found_inf);
  }
  bool supports_found_inf() const override { return optimizer_->supports_found_inf(); }
  bool capturable() const override { return optimizer_->capturable(); }
  int64_t num_changes() const override { return optimizer_->num_changes(); }
  std::string state_name() const override { return optimizer_->state_name(); }
  StateDict state_dict() const override { return optimizer_->state_dict(); }
  void load_state_dict(const StateDict& state) override { optimizer_->load_state_dict(state); }

  /// The optimizer itself, for what only its own class can do.
  Optimizer& get() { return *optimizer_; }
  const Optimizer& get() const { return *optimizer_; }

 private:
  std::unique_ptr<Optimizer> optimizer_;
};

}  // namespace ddp
