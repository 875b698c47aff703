// SPDX-License-Identifier: Apache-2.0
// From 8-bit pixels to the floats of a batch: crop, resize, flip, cutout, normalise.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "ddp/data/augmentation.hpp"
#include "ddp/data/options.hpp"

namespace ddp::detail {

/// 8-bit RGB in memory that somebody else owns, [height, width, 3].
struct ImageView {
  const uint8_t* pixels = nullptr;
  int width = 0;
  int height = 0;
};

struct RealBox {
  double x = 0;
  double y = 0;
  double width = 0;
  double height = 0;
};

/// Resizes a part of `image` to [size, size, 3] floats in 0..255 (memory is reused): the triangle
/// filter widened by the scale, as Pillow's BILINEAR (Resample.c), without its rounding to 8 bits.
/// Pixels outside the box do not count.
void resample(const ImageView& image, const RealBox& box, int size, std::vector<float>& out);

class ImageTransform {
 public:
  /// `options` resolved: image_size, eval_resize, augment, mean and std are set.
  ImageTransform(const DataOptions& options, bool train);

  int image_size() const { return size_; }
  /// What the sample's image has to be: any size, or image_size x image_size already.
  bool needs_square() const { return mode_ == Augment::PadCrop; }

  /// The part of a full-size image that apply() will look at (the same draws).
  CropBox source_box(int width, int height, uint64_t epoch, uint64_t index) const;

  /// Writes [3, S, S], or [S, S, 3] with channels_last. `full_width` and `full_height` are the
  /// file's where `image` was decoded at a part of its size.
  void apply(const ImageView& image, int full_width, int full_height, uint64_t epoch,
             uint64_t index, float* out) const;

 private:
  RandomResizedCrop draw(int width, int height, uint64_t epoch, uint64_t index) const;
  void pad_crop(const ImageView& image, uint64_t epoch, uint64_t index, float* out) const;
  void copy_same_size(const ImageView& image, float* out) const;
  void normalise(const float* pixels, bool flip, float* out) const;
  void cut_out(int x, int y, float* out) const;

  Augment mode_;
  int size_;
  int eval_resize_;
  uint64_t seed_;
  int pad_;
  bool flip_;
  int cutout_;
  bool channels_last_;
  RandomResizedCropBounds bounds_;
  std::array<std::array<float, 256>, 3> table_;  ///< normalised value of an 8-bit one
  std::array<float, 3> scale_;                   ///< normalised = pixel * scale + shift
  std::array<float, 3> shift_;
};

}  // namespace ddp::detail
