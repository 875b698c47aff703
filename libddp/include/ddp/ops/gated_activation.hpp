// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::ops {

/// silu(gate) * up (Shazeer, arXiv:2002.05202). Keeps its two inputs for the backward and nothing
/// else. Equal shapes.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace ddp::ops
