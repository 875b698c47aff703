// SPDX-License-Identifier: Apache-2.0
// Mixup (Zhang et al., 2017) and CutMix (Yun et al., 2019), with torchvision's definitions. The
// partner of each image is the one at its place in the reversed batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace examples {

/// Columns [left, right) and rows [top, bottom).
struct PixelBox {
  int64_t left = 0;
  int64_t top = 0;
  int64_t right = 0;
  int64_t bottom = 0;
};

/// How a batch is mixed with its reverse.
struct ImageMix {
  double weight = 1;              ///< share of an image's own target
  std::optional<PixelBox> box{};  ///< CutMix: pixels taken from the partner; nullopt: mixup
};

struct ImageMixSettings {
  double mixup = 0;   ///< alpha of the Beta distribution; 0: off
  double cutmix = 0;  ///< same
  uint64_t seed = 0;
  int rank = 0;

  bool is_on() const { return mixup > 0 || cutmix > 0; }
};

/// Draws the mix of one batch of images of `height` x `width`. With both methods on, either has
/// probability 1/2. A pure function of its arguments: ranks and batches draw independently, and a
/// resumed run draws the same.
ImageMix draw_image_mix(const ImageMixSettings& settings, int64_t draw, int64_t height,
                        int64_t width);

/// torchvision's box of CutMix: sides sqrt(1 - lambda) of the image's, clipped at the border. The
/// weight is the share of the pixels outside.
ImageMix cut_mix(double lambda, int64_t centre_x, int64_t centre_y, int64_t height, int64_t width);

/// Mixes [batch, channels, height, width] into new memory. Mixup: weight * images + (1 - weight) *
/// the reversed batch.
at::Tensor mix_images(const at::Tensor& images, const ImageMix& mix);

}  // namespace examples
