// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::ops {

/// Call this on the current stream after each write to `parameter` that its optimizer did not make,
/// or the next step undoes that write from its float32 master. A master that already rounds to the
/// parameter stays unchanged, unless `exactly` demands equality, for example to make ranks agree in
/// every bit. A step also detects a parameter whose memory was replaced.
void overwritten(const at::Tensor& parameter, bool exactly = false);

}  // namespace ddp::ops
