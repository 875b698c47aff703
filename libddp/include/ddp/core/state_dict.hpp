// SPDX-License-Identifier: Apache-2.0
// What a checkpoint keeps of an object: tensors and small values under stable names.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <variant>

namespace ddp {

using StateValue = std::variant<bool, int64_t, double, std::string>;

struct StateDict {
  std::map<std::string, at::Tensor> tensors;
  std::map<std::string, StateValue> values;
};

/// Anything a Checkpointer can keep: model, optimizer, scaler, loader, or a user's own object.
class Stateful {
 public:
  virtual ~Stateful() = default;
  /// Where its entries go: "model", "optimizer", "scaler", "loader", … One object a name.
  virtual std::string state_name() const = 0;
  /// Tensors may alias live memory: whoever keeps the result beyond the step copies.
  virtual StateDict state_dict() const = 0;
  /// Throws MismatchError naming the first key that is missing, unexpected or of another shape;
  /// then nothing was changed.
  virtual void load_state_dict(const StateDict& state) = 0;
};

}  // namespace ddp
