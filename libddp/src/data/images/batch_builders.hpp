// SPDX-License-Identifier: Apache-2.0
// Builders of image batches on a GPU, and helpers that loaders of images share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "ddp/data/dataset.hpp"
#include "ddp/data/options.hpp"
#include "ddp/detail/prefetch_source.hpp"

#ifdef DDP_HAS_CUDA
#include "data/images/augmentation_kernels.hpp"
#endif

namespace ddp::detail {

/// Returns a builder for JPEG images on a GPU if options.device_transform allows one, else nullptr.
/// Throws SettingsError if device_transform=on is impossible.
std::unique_ptr<BatchBuilder<Batch>> make_device_builder(
    const std::shared_ptr<const Dataset>& dataset, at::Device device, const LoaderOptions& options,
    int num_slots, int64_t max_batch);

/// Adds sample index and epoch to an exception, in its catch block. Errors of the library keep type
/// and exit code. Others become the cause (std::rethrow_if_nested) of an error with their message.
[[noreturn]] void rethrow_with_sample(int64_t index, int64_t epoch);

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

/// A builder that decodes JPEG images on the host or the GPU, and transforms them on the GPU. In
/// builds with CUDA.
std::unique_ptr<BatchBuilder<Batch>> make_region_builder(std::shared_ptr<const Dataset> dataset,
                                                         at::Device device,
                                                         const LoaderOptions& options,
                                                         int num_slots, int64_t max_batch);

#ifdef DDP_HAS_CUDA
inline KernelDtype kernel_dtype(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? KernelDtype::Bf16
                                : (dtype == at::kHalf ? KernelDtype::Fp16 : KernelDtype::Fp32);
}
#endif

}  // namespace ddp::detail
