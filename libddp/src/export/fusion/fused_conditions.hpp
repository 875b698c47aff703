// SPDX-License-Identifier: Apache-2.0
// Whether an op takes the inputs that a fused function got. LibTorch's operators take more.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/ScalarOps.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

namespace ddp::detail::fused {

/// In a checkpointed block a value from outside may be a number.
inline at::Tensor tensor_of(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::native::wrapped_scalar_tensor(value.toScalar());
}

/// Of a list of sizes, as a program's lists of sizes are.
inline std::vector<int64_t> integers_at(const c10::IValue& list) {
  std::vector<int64_t> integers;
  for (const auto& item : list.toListRef()) {
    integers.push_back(item.toInt());
  }
  return integers;
}

/// Autocast leaves float64 alone, and the ops do not.
inline bool is_double(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble;
}

inline bool is_under_autocast(const at::Tensor& x) {
  return at::autocast::is_autocast_enabled(x.device().type());
}

/// Whether LibTorch takes the weight for this input in a dtype that the ops have.
inline bool has_dtype_of(const at::Tensor& input, const at::Tensor& weight) {
  return input.is_floating_point() && !is_double(input) &&
         (is_under_autocast(input) ? weight.is_floating_point()
                                   : weight.scalar_type() == input.scalar_type());
}

inline bool is_alike(const at::Tensor& x, const at::Tensor& other) {
  return other.sizes() == x.sizes() && other.scalar_type() == x.scalar_type() &&
         other.device() == x.device();
}

/// Of a layer with this number of outputs. LibTorch also broadcasts other biases.
inline bool fits_bias(int64_t outputs, const at::Tensor& bias) {
  return !bias.defined() || (bias.dim() == 1 && bias.size(0) == outputs);
}

}  // namespace ddp::detail::fused
