// SPDX-License-Identifier: Apache-2.0
// Turns decoded regions into a batch on the GPU: resize, flip, cutout, normalise, cast. Takes raw
// pointers and a stream; nothing here waits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "data/images/augmentation_kernels.hpp"
#include "data/images/resample_taps.hpp"

namespace ddp::detail {

/// One image of a batch, as the kernels see it.
struct DeviceRegion {
  const uint8_t* pixels = nullptr;  ///< [height, width, 3], device memory
  int64_t row_bytes = 0;            ///< from one row to the next
  int x = 0, y = 0;                 ///< image column and row of the first pixel
  ResampleAxis columns;
  ResampleAxis rows;
  int64_t target = 0;
  int cutout_x = 0, cutout_y = 0;
  int cutout = 0;  ///< side of the cut square; 0: none
  int flip = 0;
  int same_size = 0;  ///< no resizing; bytes are normalised as in torchvision
};

struct RegionBatch {
  const DeviceRegion* regions = nullptr;  ///< [n], device memory
  int num_images = 0;
  int size = 0;          ///< side of the output
  int channels = 3;      ///< of the output; the first of the pixels' three
  int stride = 0;        ///< max_taps() of any image's axes
  void* taps = nullptr;  ///< region_taps_bytes() of device memory
  void* data = nullptr;
  int64_t* target = nullptr;  ///< [n]
};

/// Scratch memory for a batch.
int64_t region_taps_bytes(int num_images, int size, int stride);

/// Equals ImageTransform's result on the CPU bit for bit, rounded to `dtype`.
cudaError_t launch_region_batch(const RegionBatch& batch, const Normalisation& normalisation,
                                KernelDtype dtype, bool channels_last, cudaStream_t stream);

}  // namespace ddp::detail
