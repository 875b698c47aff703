// SPDX-License-Identifier: Apache-2.0
// The listener of ops/overwritten.hpp: the owner of a parameter's higher-precision copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace ddp::ops {

/// Sets the listener of `parameter` and replaces the previous one.
void on_overwritten(const at::Tensor& parameter, std::function<void(bool exactly)> listener);

/// Whether `parameter` has a listener. Giving the parameter other memory (set_data, module->to)
/// removes the listener, even if the new memory has the same address.
bool is_watched(const at::Tensor& parameter);

}  // namespace ddp::ops
