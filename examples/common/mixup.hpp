// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "ddp/ops/vision.hpp"

namespace examples {

inline constexpr double kMaxMixupAlpha = 4;

/// Returns a weight from Beta(alpha, alpha), 0 < alpha <= kMaxMixupAlpha. It is a pure function of
/// its arguments: ranks and micro-batches draw independently, and a resumed run draws the same.
double mixup_weight(double alpha, uint64_t seed, int64_t draw, int rank);

/// weight * images + (1 - weight) * images in reverse order; [batch, …].
at::Tensor mix_images(const at::Tensor& images, double weight);

/// Returns the mean cross entropy of the batch and the number of correct targets. With
/// `mixup_weights`, float32 {weight, 1 - weight}, the loss is that of the images mixed by
/// mix_images: weight * loss(target) + (1 - weight) * loss(target reversed).
ddp::ops::CrossEntropyResult classification_loss(const at::Tensor& logits, const at::Tensor& target,
                                                 double label_smoothing,
                                                 const at::Tensor& mixup_weights = {});

}  // namespace examples
