// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

namespace ddp {

/// A number that a step needs. Eager steps know it on the host. Captured steps know it only on the
/// device, as a 0-dim float32 tensor. Default-constructed: absent.
class StepScalar {
 public:
  StepScalar() = default;
  StepScalar(double value) : value_(value) {}
  StepScalar(at::Tensor tensor) : tensor_(std::move(tensor)) {}

  bool defined() const { return value_.has_value() || tensor_.defined(); }
  const std::optional<double>& value() const { return value_; }  ///< if the host knows it
  /// A 0-dim tensor on `device`, float32 unless given as float64, without a host wait.
  at::Tensor tensor(at::Device device) const;

 private:
  std::optional<double> value_;
  at::Tensor tensor_;
};

}  // namespace ddp
