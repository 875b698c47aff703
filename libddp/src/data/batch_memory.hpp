// SPDX-License-Identifier: Apache-2.0
// Dtype and memory of a loader's batches.
#pragma once

#include <ATen/core/Tensor.h>

#include "ddp/data/options.hpp"

namespace ddp::detail {

/// The LibTorch dtype of `dtype`.
inline at::ScalarType scalar_type(ImageDtype dtype) {
  switch (dtype) {
    case ImageDtype::Bf16:
      return at::kBFloat16;
    case ImageDtype::Fp16:
      return at::kHalf;
    default:
      return at::kFloat;
  }
}

/// Whether batches for `device` are made in page-locked memory.
inline bool uses_pinned_memory(at::Device device, const LoaderOptions& options) {
  return device.is_cuda() && options.pin_memory;
}

}  // namespace ddp::detail
