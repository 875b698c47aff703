// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>

#include "data/augmentation_kernels.hpp"

namespace ddp::detail {

inline KernelDtype kernel_dtype(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? KernelDtype::Bf16
                                : (dtype == at::kHalf ? KernelDtype::Fp16 : KernelDtype::Fp32);
}

}  // namespace ddp::detail
