// SPDX-License-Identifier: Apache-2.0
// Batches made on the GPU. Raw pointers and a stream; nothing here waits, and all of it can be
// captured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "data/small_image.hpp"

namespace ddp::detail {

enum class KernelDtype { Fp32, Bf16, Fp16 };

/// Where a batch begins.
struct BatchPlace {
  int32_t offset = 0;  ///< in the order
  int32_t epoch = 0;   ///< what the augmentation draws for
};

/// A set of decoded images in device memory, and a batch of it.
struct ResidentSet {
  const uint8_t* pixels = nullptr;           ///< [n, side, side, 3]
  const int64_t* labels = nullptr;           ///< [n]
  const int32_t* order = nullptr;            ///< samples, as epochs consume them
  const float* table = nullptr;              ///< [3, 256]: normalise_byte() of each byte
  BatchPlace place;                          ///< of the batch to make
  const BatchPlace* device_place = nullptr;  ///< read by the kernel instead, where not null
};

/// Largest image that the kernel takes: it lies in a block's shared memory.
inline constexpr int kMaxResidentSide = 120;

/// Writes the `num_samples` samples from the place on. `data`: [n, side, side, 3] or, without
/// `channels_last`, [n, 3, side, side].
cudaError_t launch_resident_batch(const ResidentSet& set, const SmallImageTransform& transform,
                                  int64_t num_samples, KernelDtype dtype, bool channels_last,
                                  void* data, int64_t* target, cudaStream_t stream);

}  // namespace ddp::detail
