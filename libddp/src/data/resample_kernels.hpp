// SPDX-License-Identifier: Apache-2.0
// Decoded parts of images to a batch on the GPU: resize, flip, cutout, normalise, cast. Raw
// pointers and a stream; nothing here waits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "data/augmentation_kernels.hpp"
#include "data/resample_taps.hpp"

namespace ddp::detail {

/// One image of a batch, as the kernels see it.
struct DeviceRegion {
  int64_t offset = 0;     ///< of its pixels [height, width, 3] in the block of pixels, in bytes
  int64_t row_bytes = 0;  ///< from one row to the next
  int x = 0, y = 0;       ///< column and row of the image that the pixels begin at
  ResampleAxis columns;
  ResampleAxis rows;
  int64_t target = 0;
  int cutout_x = 0, cutout_y = 0;
  int cutout = 0;  ///< side of the cut square; 0: none
  int flip = 0;
  int as_it_is = 0;  ///< nothing is resized, and bytes are normalised as torchvision does
};

/// Of all images: scale and shift are for resized pixels, mean and std for bytes as they are.
struct Normalisation {
  float scale[3], shift[3], mean[3], std[3];
};

struct RegionBatch {
  const DeviceRegion* regions = nullptr;  ///< [n], device memory
  const uint8_t* pixels = nullptr;
  int num_images = 0;
  int size = 0;          ///< side of the output
  int stride = 0;        ///< max_taps() of any image's axes
  void* taps = nullptr;  ///< region_taps_bytes() of device memory
  void* data = nullptr;
  int64_t* target = nullptr;  ///< [n]
};

/// Scratch memory for a batch.
int64_t region_taps_bytes(int num_images, int size, int stride);

/// Bit for bit what ImageTransform makes on the CPU of the same pixels, rounded to `dtype`.
cudaError_t launch_region_batch(const RegionBatch& batch, const Normalisation& normalisation,
                                KernelDtype dtype, bool channels_last, cudaStream_t stream);

}  // namespace ddp::detail
