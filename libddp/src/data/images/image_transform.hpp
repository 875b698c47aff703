// SPDX-License-Identifier: Apache-2.0
// Turns 8-bit pixels into the floats of a batch: crop, resize, flip, RandAugment, normalise,
// cutout. Pixels are RGB everywhere. A grey image (data.channels=1) has three equal values per
// pixel, of which the batch gets the first.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "data/images/augmentation.hpp"
#include "data/images/image_file.hpp"
#include "data/images/rand_augment.hpp"
#include "data/images/resample_taps.hpp"
#include "ddp/data/options.hpp"

namespace ddp::detail {

/// The transform of one image in one epoch, in plain numbers for host and device.
struct RegionPlan {
  int denominator = 1;  ///< decoded at 1 / denominator of the size
  int whole_width = 0;  ///< of the image at that size; unit of the fields below
  int whole_height = 0;
  CropBox region;        ///< all pixels used
  ResampleAxis columns;  ///< resized to the output
  ResampleAxis rows;
  bool exact = false;  ///< resized in Pillow's arithmetic, by the host
  bool flip = false;
  bool same_size = false;  ///< the image has the output's size: no resizing
  int cutout_x = 0;        ///< centre of the cut square, if `cutout`
  int cutout_y = 0;
  bool cutout = false;
  std::vector<AugmentStep> rand_augment;  ///< applied to bytes of the output's size, by the host
};

class ImageTransform {
 public:
  /// `options` must be resolved: image_size, eval_resize, augment, mean and std are set.
  ImageTransform(const DataOptions& options, bool train);

  int image_size() const { return size_; }
  bool is_random() const { return mode_ != Augment::None; }
  /// Whether images are resized in Pillow's arithmetic.
  bool is_exact() const { return !is_random() && eval_decode_ == EvalDecode::Full; }
  /// Whether a sample's image must already be image_size x image_size, instead of any size.
  bool needs_square() const { return mode_ == Augment::PadCrop; }

  /// Operations of RandAugment per image; they run on the CPU only.
  int num_rand_augment_ops() const { return rand_augment_ops_; }
  /// The operations for one sample: a pure function of seed, epoch and index.
  std::vector<AugmentStep> draw_augment_steps(uint64_t epoch, uint64_t index) const;

  /// The transform as a function of one value, for images of image_size; nullopt if apply()
  /// resizes or uses RandAugment.
  std::optional<SmallImageTransform> small_image_transform() const;

  /// Plans a sample whose file has `width` x `height` pixels and is decodable at up to 1 /
  /// `largest_denominator`. Not for PadCrop.
  RegionPlan plan(int width, int height, uint64_t epoch, uint64_t index,
                  int largest_denominator = 8) const;
  /// The plan for an image of the output's size, shown unchanged.
  RegionPlan plan_same_size() const;

  /// Writes [channels, S, S], or [S, S, channels] with channels_last. `image` covers at least
  /// plan.region.
  void apply(const ImageView& image, const RegionPlan& plan, float* out) const;
  /// The same for a whole decoded image.
  void apply(const ImageView& image, uint64_t epoch, uint64_t index, float* out) const;

  int channels() const { return channels_; }  ///< of the output
  bool channels_last() const { return channels_last_; }
  int cutout() const { return cutout_; }
  const Normalisation& normalisation() const { return normalisation_; }

 private:
  RegionPlan plan_crop(int width, int height, uint64_t epoch, uint64_t index,
                       int largest_denominator) const;
  RegionPlan plan_centre(int width, int height, int largest_denominator) const;
  void augment_and_normalise(const std::vector<AugmentStep>& steps, uint8_t* bytes,
                             float* out) const;
  void pad_crop(const ImageView& image, const PadCrop& crop, uint8_t* out) const;
  void mirror(uint8_t* pixels) const;
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
  int rand_augment_ops_;
  int rand_augment_magnitude_;
  int channels_;
  bool channels_last_;
  RandomResizedCropBounds bounds_;
  std::array<std::array<float, 256>, 3> table_;  ///< normalised value of each byte
  Normalisation normalisation_;
};

/// Resizes on the CPU, columns first, then rows, to [rows.size, columns.size, 3] floats in 0..255
/// (memory is reused).
void resample(const ImageView& image, const ResampleAxis& columns, const ResampleAxis& rows,
              std::vector<float>& out);

/// Same in Pillow's arithmetic (Resample.c, ImagingResample with 8 bits per channel): fixed-point
/// weights, bytes after either pass. Every byte equals Pillow's.
void resample_bytes(const ImageView& image, const ResampleAxis& columns, const ResampleAxis& rows,
                    uint8_t* out);

}  // namespace ddp::detail
