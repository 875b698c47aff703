// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::ops::detail {

/// A matrix in FP8 (e4m3) with a scale per row: row i is scales[i] * values[i].
struct QuantizedRows {
  at::Tensor values;  ///< float8_e4m3fn [rows, columns]
  at::Tensor scales;  ///< float32 [rows]
};

/// The scale makes a row's largest magnitude 448, the format's largest number. It is 1 for a row of
/// zeros or of magnitudes up to kTinyFp8Row, which becomes zeros: 448 / largest could overflow.
QuantizedRows quantize_rows(const at::Tensor& matrix);

}  // namespace ddp::ops::detail
