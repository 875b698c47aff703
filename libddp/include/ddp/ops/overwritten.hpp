// SPDX-License-Identifier: Apache-2.0
// Notifies the owner of a parameter's higher-precision copy (an optimizer's float32 master of a
// half weight) of values from elsewhere. Without the notification the next step would undo these
// values.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace ddp::ops {

/// Sets the listener of `parameter` and replaces the previous one.
void on_overwritten(const at::Tensor& parameter, std::function<void(bool exactly)> listener);

/// Whether `parameter` has a listener. Giving the parameter other memory (set_data, module->to)
/// removes the listener, even if the new memory has the same address.
bool is_watched(const at::Tensor& parameter);

/// Call this on the current stream after each write to `parameter` that its optimizer did not make.
/// The master then rounds to the parameter. A master that already rounds to it stays unchanged,
/// unless `exactly` demands equality, for example to make ranks agree in every bit. Does nothing
/// for tensors without listener. A parameter that got other memory since the last step has no
/// listener: the next step treats it as overwritten, not `exactly`.
void overwritten(const at::Tensor& parameter, bool exactly = false);

}  // namespace ddp::ops
