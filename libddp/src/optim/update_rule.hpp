// SPDX-License-Identifier: Apache-2.0
// The slots of each optimizer, and its arithmetic on lists of tensors. Flat and sharded optimizers
// take the slots from here; their arithmetic is in flat/math.hpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "ddp/optim/make_optimizer.hpp"
#include "ddp/optim/optimizer.hpp"

namespace ddp::detail {

/// Tensors of one device, dtype and group: entry i of each list belongs to parameter i.
struct UpdateBatch {
  std::vector<at::Tensor> params;              // fp32 leaves or masters
  std::vector<at::Tensor> grads;               // strides and dtype of params; not changed
  std::vector<std::vector<at::Tensor>> slots;  // [slot][parameter]
  std::vector<at::Tensor> steps;               // 0-dim float32, updates made including this one
  bool first = false;                          // no parameter was updated before
  double lr_scale = 1.0;
  double weight_decay = 0.0;
  bool adapts = true;                   // LARS, LAMB: the parameters have trust ratios
  std::optional<at::Tensor> found_inf;  // 1: change nothing
};

class UpdateRule {
 public:
  virtual ~UpdateRule() = default;
  /// "sgd", "adam", "adamw", "lars", "lamb".
  virtual std::string type() const = 0;
  /// Names of the tensors kept per parameter, each with its shape, initially zero. A checkpoint
  /// has these names. Their order is that of UpdateBatch::slots and FlatSegment::slots.
  virtual std::vector<std::string> slots() const = 0;
  /// Whether updates are counted per parameter.
  virtual bool counts_steps() const = 0;
  /// Whether an update may be wrong if the host does not know found_inf while `first`.
  virtual bool first_update_differs() const { return false; }
  virtual void update(const UpdateBatch& batch, const StepScalar& lr) const = 0;
};

std::unique_ptr<UpdateRule> make_update_rule(const OptimizerOptions& options);

}  // namespace ddp::detail
