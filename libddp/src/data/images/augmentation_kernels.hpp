// SPDX-License-Identifier: Apache-2.0
// Batches made on the GPU, from raw pointers and a stream. Nothing here waits; everything can be
// captured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "data/images/augmentation.hpp"

namespace ddp::detail {

enum class KernelDtype { Fp32, Bf16, Fp16 };

/// The start of a batch.
struct BatchPlace {
  int32_t offset = 0;  ///< in the order
  int32_t epoch = 0;   ///< of the augmentation's random numbers
};

/// A set of decoded images in device memory, and a batch of it.
struct ResidentSet {
  const uint8_t* pixels = nullptr;           ///< [n, side, side, 3]
  const int64_t* labels = nullptr;           ///< [n]
  const int32_t* order = nullptr;            ///< samples in the order of consumption
  const float* table = nullptr;              ///< [3, 256]: normalise_byte() of each byte
  BatchPlace place;                          ///< of the batch to make
  const BatchPlace* device_place = nullptr;  ///< if set, the kernel reads the place here
};

/// Largest image of the kernel, limited by a block's shared memory.
inline constexpr int kMaxResidentSide = 120;

/// Writes `num_samples` samples, starting at the place. `data`: [n, side, side, 3] or, without
/// `channels_last`, [n, channels, side, side].
cudaError_t launch_resident_batch(const ResidentSet& set, const SmallImageTransform& transform,
                                  int64_t num_samples, KernelDtype dtype, bool channels_last,
                                  void* data, int64_t* target, cudaStream_t stream);

}  // namespace ddp::detail
