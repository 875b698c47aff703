// SPDX-License-Identifier: Apache-2.0
// The parameters of a sample's random augmentation, drawn from the sample's counter RNG. CPU code
// and device kernels that call these functions get the same bits. Every function draws a fixed
// number of values (random_resized_crop: until a try fits), whatever the settings are. So switching
// the flip off does not move the crops.
#pragma once

#include <cmath>
#include <cstdint>

#include "ddp/data/sample_rng.hpp"

namespace ddp {

/// Part of an image: columns [x, x + width), rows [y, y + height).
struct CropBox {
  int x = 0;
  int y = 0;
  int width = 0;
  int height = 0;
};

/// Zero-padding by `pad` on all sides, then a crop of the original size, as
/// torchvision.transforms.RandomCrop(size, padding=pad).
struct PadCrop {
  int dx = 0;  ///< in -pad .. pad; output column x is input column x + dx, zero outside
  int dy = 0;
  bool flip = false;  ///< the output is mirrored
  int cutout_x = 0;   ///< centre of the cut square in the output (DeVries and Taylor, 2017);
  int cutout_y = 0;   ///< the square is clipped at the border
};

DDP_HOST_DEVICE inline PadCrop draw_pad_crop(SampleRng& rng, int size, int pad) {
  PadCrop result;
  result.dx = static_cast<int>(rng.below(static_cast<uint32_t>(2 * pad + 1))) - pad;
  result.dy = static_cast<int>(rng.below(static_cast<uint32_t>(2 * pad + 1))) - pad;
  result.flip = rng.coin();
  result.cutout_x = static_cast<int>(rng.below(static_cast<uint32_t>(size)));
  result.cutout_y = static_cast<int>(rng.below(static_cast<uint32_t>(size)));
  return result;
}

/// Bounds of torchvision.transforms.RandomResizedCrop.
struct RandomResizedCropBounds {
  double min_scale = 0.08;
  double max_scale = 1.0;
  double min_log_ratio = -0.28768207245178085;  ///< log(3 / 4)
  double max_log_ratio = 0.28768207245178085;
  double min_ratio = 0.75;
  double max_ratio = 4.0 / 3.0;
};

struct RandomResizedCrop {
  CropBox box;
  bool flip = false;
  int cutout_x = 0;  ///< in the output, as in PadCrop
  int cutout_y = 0;
};

namespace detail {

// Products and sums that a compiler must not fuse into one rounding: host and device agree.
DDP_HOST_DEVICE inline double mul(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}
DDP_HOST_DEVICE inline double add(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

// exp(x) for |x| <= 3 from exactly rounded operations only (library versions differ in the last
// bit). Taylor's polynomial of degree 10 at x / 16, squared four times; relative error below 1e-14.
DDP_HOST_DEVICE inline double portable_exp(double x) {
  const double t = mul(x, 1.0 / 16);
  double sum = 1.0;
  for (int k = 10; k >= 1; --k) {
    sum = add(1.0, mul(sum, t / k));
  }
  for (int i = 0; i < 4; ++i) {
    sum = mul(sum, sum);
  }
  return sum;
}

// Rounded, at least one pixel.
DDP_HOST_DEVICE inline int box_side(double length) {
  const int side = static_cast<int>(floor(add(length, 0.5)));
  return side > 0 ? side : 1;
}

DDP_HOST_DEVICE inline CropBox centre_box_within(int width, int height, double min_ratio,
                                                 double max_ratio) {
  CropBox box{0, 0, width, height};
  const double ratio = static_cast<double>(width) / height;
  if (ratio < min_ratio) {
    box.height = box_side(width / min_ratio);
  } else if (ratio > max_ratio) {
    box.width = box_side(mul(height, max_ratio));
  }
  box.x = (width - box.width) / 2;
  box.y = (height - box.height) / 2;
  return box;
}

}  // namespace detail

/// As torchvision.transforms.RandomResizedCrop.get_params: ten tries, then the largest centre box
/// within the ratio bounds. `width` and `height` of the image, `size` of the output, all positive.
DDP_HOST_DEVICE inline RandomResizedCrop draw_random_resized_crop(
    SampleRng& rng, int width, int height, int size, const RandomResizedCropBounds& bounds) {
  RandomResizedCrop result;
  result.flip = rng.coin();
  result.cutout_x = static_cast<int>(rng.below(static_cast<uint32_t>(size)));
  result.cutout_y = static_cast<int>(rng.below(static_cast<uint32_t>(size)));
  const double area = detail::mul(width, height);
  for (int attempt = 0; attempt < 10; ++attempt) {
    const double scale = detail::add(
        bounds.min_scale, detail::mul(bounds.max_scale - bounds.min_scale, rng.uniform()));
    const double ratio = detail::portable_exp(
        detail::add(bounds.min_log_ratio,
                    detail::mul(bounds.max_log_ratio - bounds.min_log_ratio, rng.uniform())));
    const double target = detail::mul(area, scale);
    const int w = static_cast<int>(floor(detail::add(sqrt(detail::mul(target, ratio)), 0.5)));
    const int h = static_cast<int>(floor(detail::add(sqrt(target / ratio), 0.5)));
    const uint32_t place_x = rng.next();
    const uint32_t place_y = rng.next();
    if (w > 0 && h > 0 && w <= width && h <= height) {
      const auto room_x = static_cast<uint64_t>(width - w + 1);
      const auto room_y = static_cast<uint64_t>(height - h + 1);
      result.box = {static_cast<int>(place_x * room_x >> 32),
                    static_cast<int>(place_y * room_y >> 32), w, h};
      return result;
    }
  }
  result.box = detail::centre_box_within(width, height, bounds.min_ratio, bounds.max_ratio);
  return result;
}

namespace detail {

// One value of a batch from a decoded image of the model's size: pad-crop, flip, cutout, normalise.
// ImageTransform's row-wise loops are a faster form for a whole image on the CPU.

/// The transform of a set's images: plain numbers, passed to kernels by value.
struct SmallImageTransform {
  int side = 0;         ///< of both image and output
  int channels = 3;     ///< of the output; the first of the image's three
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
  float scale[3] = {}, shift[3] = {}, mean[3] = {}, std[3] = {1, 1, 1};
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

}  // namespace detail

}  // namespace ddp
