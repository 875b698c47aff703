// SPDX-License-Identifier: Apache-2.0
// The loss scale of the running backward, for comm hooks that keep gradients from one backward to
// the next.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::detail {

/// Call with `loss` = (unscaled loss) * `scale`. Every backward from `loss` then runs with this
/// loss scale, until it ends or throws. One scaled backward runs at a time per process.
void set_loss_scale(const at::Tensor& loss, const at::Tensor& scale);

/// The loss scale of the running backward, one element on the device; undefined: 1. The tensor's
/// value may change after the backward. Any thread.
at::Tensor running_loss_scale();

}  // namespace ddp::detail
