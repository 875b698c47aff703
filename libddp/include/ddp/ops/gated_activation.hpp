// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::ops {

/// silu(gate) * up of equal shapes (Shazeer, arXiv:2002.05202). Saves only its two inputs for the
/// backward.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace ddp::ops
