// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ddp::ops::detail {

inline constexpr float kFp8Max = 448;  ///< largest finite e4m3
/// Rows of no larger magnitude become zeros, with scale 1: 448 / largest could overflow.
inline constexpr float kTinyFp8Row = 1e-30F;

}  // namespace ddp::ops::detail
