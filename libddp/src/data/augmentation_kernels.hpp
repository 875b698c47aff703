// SPDX-License-Identifier: Apache-2.0
// Batches made on the GPU. Raw pointers and a stream; nothing here waits, and all of it can be
// captured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "data/small_image.hpp"

namespace ddp::detail {

enum class KernelDtype { Fp32, Bf16, Fp16 };

/// Where the next batch begins, in device memory.
struct DeviceCursor {
  int64_t offset = 0;     ///< in `order`
  int64_t count = 0;      ///< of `order`
  int64_t epoch = 0;      ///< what the augmentation draws for
  uint32_t finished = 0;  ///< blocks of the running kernel that are done
};

/// A set of decoded images in device memory.
struct ResidentSet {
  const uint8_t* pixels = nullptr;  ///< [n, side, side, 3]
  const int64_t* labels = nullptr;  ///< [n]
  const int32_t* order = nullptr;   ///< samples of this epoch
  const float* table = nullptr;     ///< [3, 256]: normalise_byte() of each byte
  DeviceCursor* cursor = nullptr;
};

/// Largest image that the kernel takes: it lies in a block's shared memory.
inline constexpr int kMaxResidentSide = 120;

/// Writes the `num_samples` samples at the cursor and moves the cursor behind them. `data`:
/// [n, side, side, 3] or, without `channels_last`, [n, 3, side, side]. Reads beyond the order's end
/// begin at its start again.
cudaError_t launch_resident_batch(const ResidentSet& set, const SmallImageTransform& transform,
                                  int64_t num_samples, KernelDtype dtype, bool channels_last,
                                  void* data, int64_t* target, cudaStream_t stream);

/// Puts the cursor somewhere.
cudaError_t launch_set_cursor(DeviceCursor* cursor, int64_t offset, int64_t count, int64_t epoch,
                              cudaStream_t stream);

}  // namespace ddp::detail
