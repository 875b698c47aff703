// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/language/fp8.hpp"

namespace ddp::ops::detail {

/// ops::swiglu() and its gradient for ops that contain it; no autograd.
at::Tensor swiglu_forward(const at::Tensor& gate_up);
at::Tensor swiglu_backward(const at::Tensor& grad, const at::Tensor& gate_up);

struct SwigluGradient {
  at::Tensor rows;       ///< [rows, 2 * width]
  QuantizedRows in_fp8;  ///< of `rows`
};
/// Both in one pass where a kernel fits. gate_up [rows, 2 * width], grad [rows, width]
SwigluGradient swiglu_backward_fp8(const at::Tensor& grad, const at::Tensor& gate_up);

}  // namespace ddp::ops::detail
