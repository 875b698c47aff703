// SPDX-License-Identifier: Apache-2.0
// From 8-bit pixels to the floats of a batch: crop, resize, flip, cutout, normalise.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "data/image_view.hpp"
#include "data/resample_taps.hpp"
#include "data/small_image.hpp"
#include "ddp/data/augmentation.hpp"
#include "ddp/data/options.hpp"

namespace ddp::detail {

/// What becomes of one image in one epoch: plain numbers, for host and device.
struct RegionPlan {
  int denominator = 1;  ///< decoded at 1 / denominator of the size
  int whole_width = 0;  ///< of the image at that size, in whose pixels the rest is
  int whole_height = 0;
  CropBox region;        ///< all pixels that count
  ResampleAxis columns;  ///< what is resized to the output
  ResampleAxis rows;
  bool exact = false;  ///< resized in Pillow's arithmetic: the host does that
  bool flip = false;
  bool as_it_is = false;  ///< the image has the output's size: nothing is resized
  int cutout_x = 0;       ///< centre of the cut square, where `cutout`
  int cutout_y = 0;
  bool cutout = false;
};

class ImageTransform {
 public:
  /// `options` resolved: image_size, eval_resize, augment, mean and std are set.
  ImageTransform(const DataOptions& options, bool train);

  int image_size() const { return size_; }
  bool is_random() const { return mode_ != Augment::None; }
  /// Whether images are resized in Pillow's arithmetic.
  bool is_exact() const { return !is_random() && eval_decode_ == EvalDecode::Full; }
  /// What the sample's image has to be: any size, or image_size x image_size already.
  bool needs_square() const { return mode_ == Augment::PadCrop; }

  /// The same as one function of a value, for images of image_size: nothing where apply() resizes
  /// them.
  std::optional<SmallImageTransform> small_image_transform() const;

  /// What happens to the sample, whose file has `width` x `height` pixels and can be decoded at up
  /// to 1 / `largest_denominator`; not for PadCrop.
  RegionPlan plan(int width, int height, uint64_t epoch, uint64_t index,
                  int largest_denominator = 8) const;
  /// Of an image that has the output's size and is shown as it is.
  RegionPlan plan_as_it_is() const;

  /// Writes [3, S, S], or [S, S, 3] with channels_last, from at least plan.region.
  void apply(const ImageView& image, const RegionPlan& plan, float* out) const;
  /// The same of a whole image kept decoded.
  void apply(const ImageView& image, uint64_t epoch, uint64_t index, float* out) const;

  bool channels_last() const { return channels_last_; }
  int cutout() const { return cutout_; }
  /// normalised = pixel * scale + shift where images are resized, as torchvision where not.
  const std::array<float, 3>& scale() const { return scale_; }
  const std::array<float, 3>& shift() const { return shift_; }
  const std::array<float, 3>& mean() const { return mean_; }
  const std::array<float, 3>& std() const { return std_; }

 private:
  RegionPlan plan_crop(int width, int height, uint64_t epoch, uint64_t index,
                       int largest_denominator) const;
  RegionPlan plan_centre(int width, int height, int largest_denominator) const;
  void pad_crop(const ImageView& image, uint64_t epoch, uint64_t index, float* out) const;
  void copy_same_size(const ImageView& image, float* out) const;
  void normalise(const float* pixels, bool flip, float* out) const;
  void cut_out(int x, int y, float* out) const;

  Augment mode_;
  int size_;
  int eval_resize_;
  EvalDecode eval_decode_;
  uint64_t seed_;
  int pad_;
  bool flip_;
  int cutout_;
  bool channels_last_;
  RandomResizedCropBounds bounds_;
  std::array<std::array<float, 256>, 3> table_;  ///< normalised value of an 8-bit one
  std::array<float, 3> mean_;
  std::array<float, 3> std_;
  std::array<float, 3> scale_;  ///< normalised = pixel * scale + shift
  std::array<float, 3> shift_;
};

}  // namespace ddp::detail
