// SPDX-License-Identifier: Apache-2.0
// RandAugment (Cubuk et al., 2019): operations, magnitudes and bytes of
// torchvision.transforms.v2.RandAugment on Pillow images, with its default of nearest interpolation
// and black filling. Images are square RGB bytes, [side, side, 3].
#pragma once

#include <cstdint>
#include <vector>

#include "ddp/data/sample_rng.hpp"

namespace ddp::detail {

/// torchvision's order.
enum class AugmentOp {
  Identity,
  ShearX,
  ShearY,
  TranslateX,
  TranslateY,
  Rotate,
  Brightness,
  Color,
  Contrast,
  Sharpness,
  Posterize,
  Solarize,
  AutoContrast,
  Equalize
};
inline constexpr int kNumAugmentOps = 14;
inline constexpr int kNumMagnitudes = 31;

struct AugmentStep {
  AugmentOp op = AugmentOp::Identity;
  /// Shear: tangent. Translate: pixels. Rotate: degrees. Brightness to Sharpness: factor - 1.
  /// Posterize: bits kept. Solarize: threshold / 255. Others: unused.
  double magnitude = 0;
};

/// Whether an operation's magnitude is negated with probability 1/2.
bool has_sign(AugmentOp op);
/// Returns torchvision's unsigned magnitude number `bin` of kNumMagnitudes.
double magnitude_of(AugmentOp op, int bin, int side);

/// Draws `num_ops` operations for one image: two values of `rng` each.
std::vector<AugmentStep> draw_rand_augment(SampleRng& rng, int num_ops, int bin, int side);

/// Changes `pixels` in place.
void apply_augment_step(const AugmentStep& step, int side, uint8_t* pixels);

}  // namespace ddp::detail
