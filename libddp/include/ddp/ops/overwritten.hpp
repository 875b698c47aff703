// SPDX-License-Identifier: Apache-2.0
// Who keeps a parameter in more bits than it has (an optimizer's float32 master of a half weight)
// has to hear of values that come from elsewhere, or its next step would undo them.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace ddp::ops {

/// Instead of the listener before.
void on_overwritten(const at::Tensor& parameter, std::function<void(bool exactly)> listener);

/// Whether somebody still listens: the listener goes where the parameter is given other memory
/// (set_data, module->to), also where that has the address of what was there.
bool is_watched(const at::Tensor& parameter);

/// To be called by whoever gave `parameter` other values, but for its optimizer, behind that in the
/// order of the current stream. What is kept then rounds to the parameter: it stays where it does
/// so already, unless it has to be `exactly` the parameter, as where ranks that kept different bits
/// go on alike. Nothing for most tensors. A parameter that was given other memory since the last
/// step has no listener: the next step takes it as overwritten, not `exactly`.
void overwritten(const at::Tensor& parameter, bool exactly = false);

}  // namespace ddp::ops
