// SPDX-License-Identifier: Apache-2.0
// Named tensors: a model's parameters, and what a checkpoint stores of an object.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

namespace ddp {

/// A parameter or buffer and its dotted name, as in torch::nn::Module::named_parameters.
struct NamedParameter {
  std::string name;   ///< "layer1.0.conv1.weight"
  at::Tensor tensor;  ///< shares the module's memory
};
using NamedParameters = std::vector<NamedParameter>;  ///< in registration order

/// 16 hexadecimal digits (XXH3) over names, dtypes, shapes and every bit of the values. The host
/// waits for the device; device memory is copied in pieces.
std::string fingerprint_of(const NamedParameters& parameters);

using StateValue = std::variant<bool, int64_t, double, std::string>;  ///< an entry without tensor

/// What one object saves: entries by key.
struct StateDict {
  std::map<std::string, at::Tensor> tensors;  ///< on any device
  std::map<std::string, StateValue> values;   ///< counters and settings
};

/// Any object a Checkpointer can store: model, optimizer, scaler, loader, or a user's own.
class Stateful {
 public:
  virtual ~Stateful() = default;
  /// Names the object's entries: "model", "optimizer", … Unique per object.
  virtual std::string state_name() const = 0;
  /// Tensors may alias live memory: copy them to keep the result beyond the step.
  /// Each rank's tensor is saved if the key starts with `rank_local.`, else rank 0's.
  virtual StateDict state_dict() const = 0;
  /// Throws MismatchError naming the first key that is missing, unexpected or of another shape; the
  /// object is then unchanged.
  virtual void load_state_dict(const StateDict& state) = 0;
};

}  // namespace ddp
