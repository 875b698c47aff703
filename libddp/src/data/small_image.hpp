// SPDX-License-Identifier: Apache-2.0
// One value of a batch from a decoded image of the model's size: pad-crop, flip, cutout, normalise.
// Host and device call the same functions and get the same float. ImageTransform's row-wise loops
// are a faster form for a whole image on the CPU.
#pragma once

#include <cstdint>

#include "data/augmentation.hpp"

namespace ddp::detail {

/// The transform of a set's images: plain numbers, passed to kernels by value.
struct SmallImageTransform {
  int side = 0;         ///< of both image and output
  bool random = false;  ///< pad-crop, flip and cutout; else no change
  bool flip = false;
  int pad = 0;
  int cutout = 0;
  uint64_t seed = 0;
  float mean[3] = {0, 0, 0};
  float std[3] = {1, 1, 1};
};

/// Draws the augmentation of one sample in one epoch.
DDP_HOST_DEVICE inline PadCrop draw_small_image(const SmallImageTransform& transform,
                                                uint64_t epoch, uint64_t index) {
  if (!transform.random) {
    return {};
  }
  SampleRng rng(transform.seed, epoch, index);
  PadCrop crop = draw_pad_crop(rng, transform.side, transform.pad);
  crop.flip = crop.flip && transform.flip;
  return crop;
}

/// The normalisation of each channel. Resized pixels become pixel * scale + shift; bytes that are
/// not resized become normalise_byte(byte, mean, std).
struct Normalisation {
  float scale[3], shift[3], mean[3], std[3];
};

/// torchvision's (v / 255 - mean) / std, each operation rounded separately.
DDP_HOST_DEVICE inline float normalise_byte(uint8_t value, float mean, float std) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(__fsub_rn(__fdiv_rn(static_cast<float>(value), 255.0f), mean), std);
#else
  return (static_cast<float>(value) / 255.0f - mean) / std;
#endif
}

/// The output byte at column x, row y, channel c; -1 if cut out. `image` is [side, side, 3].
DDP_HOST_DEVICE inline int small_image_byte(const uint8_t* image,
                                            const SmallImageTransform& transform,
                                            const PadCrop& crop, int x, int y, int c) {
  const int side = transform.side;
  if (transform.random && transform.cutout > 0) {
    const int left = crop.cutout_x - transform.cutout / 2;
    const int top = crop.cutout_y - transform.cutout / 2;
    if (x >= left && x < left + transform.cutout && y >= top && y < top + transform.cutout) {
      return -1;
    }
  }
  const int from_x = (crop.flip ? side - 1 - x : x) + crop.dx;
  const int from_y = y + crop.dy;
  const bool inside = from_x >= 0 && from_x < side && from_y >= 0 && from_y < side;
  return inside ? image[(from_y * side + from_x) * 3 + c] : 0;
}

}  // namespace ddp::detail
