// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::detail {

/// Multiplies `grads` (one device and dtype) by `inverse_scale` (float32 scalar tensor) with one
/// rounding. Sets `found_inf` to 1 if an element was infinite or NaN. The host never waits.
void check_and_unscale_(at::TensorList grads, at::Tensor& found_inf,
                        const at::Tensor& inverse_scale);

/// The reference: the same from elementary operations, available for every dtype.
void check_and_unscale_composed_(at::TensorList grads, at::Tensor& found_inf,
                                 const at::Tensor& inverse_scale);

}  // namespace ddp::detail
