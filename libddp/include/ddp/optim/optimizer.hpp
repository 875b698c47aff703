// SPDX-License-Identifier: Apache-2.0
// What every optimizer of libddp can do, whatever stores its state: tensor lists today, flat
// buckets or shards of them elsewhere.
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
  StepScalar lr = {};    ///< learning rate, before each group's lr_scale; rounded to float32
  StepScalar step = {};  ///< index of the training step, for rules that draw random numbers
  StepScalar inverse_scale = {};  ///< gradients are multiplied by it first: 1 / loss scale
  StepScalar found_inf = {};      ///< 0, or 1: the step changes nothing (parameters, state, counts)
  StepScalar clip_factor = {};    ///< gradients are multiplied by it: min(1, max_norm / norm)
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

  /// Whether `found_inf` on the device makes it skip: no host has to look.
  virtual bool supports_found_inf() const = 0;
  /// Whether a CUDA graph may capture its step.
  virtual bool capturable() const = 0;

  /// Leaves every `.grad` undefined: no memory is written.
  void zero_grad();

  /// "optimizer"; programs with several optimizers give the others names of their own.
  std::string state_name() const override { return "optimizer"; }
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
  bool supports_found_inf() const override { return optimizer_->supports_found_inf(); }
  bool capturable() const override { return optimizer_->capturable(); }
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
