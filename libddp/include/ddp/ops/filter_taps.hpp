// SPDX-License-Identifier: Apache-2.0
// Which parts of a 3x3 filter anything reads. Over few pixels most of its taps lie over padding
// alone: nothing reads them, their gradient is zero, and an optimizer may leave them behind, to
// bring them up to date when somebody is about to look.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace ddp::ops {

/// One bit for each tap of a 3x3 filter: bit row * 3 + column.
using Taps = uint16_t;
constexpr Taps kAllTaps = 0x1FF;

/// What is known of a parameter's taps; lives as long as the parameter.
struct TapUse {
  /// Read by a forward that recorded gradients, or with a gradient from elsewhere than such an op.
  /// Only grows. The gradient of the others has been zero ever since the parameter has a slot.
  Taps used = 0;
  Taps left_behind = 0;             ///< an optimizer does not keep these up to date; never cleared
  std::weak_ptr<void> keeper = {};  ///< that optimizer: where it has gone, all are up to date
  /// Brings them up to date, in the order of the current stream. Costs next to nothing where they
  /// are. May be captured: each replay then does it.
  std::function<void()> bring_up_to_date = {};
};

/// nullptr for a tensor that never had a grad slot.
TapUse* find_tap_use(const at::Tensor& parameter);

/// To be called by an op's forward, and by whoever else changes the gradient, before `taps` of a
/// parameter are read in the order of the current stream. Nothing for a tensor without a slot.
void use_taps(const at::Tensor& parameter, Taps taps);

/// To be called by everybody else before a parameter is read or overwritten (saved, averaged,
/// compared), in the order of the current stream. Nothing for most tensors.
void bring_up_to_date(const at::Tensor& parameter);

}  // namespace ddp::ops
