// SPDX-License-Identifier: Apache-2.0
#include "common/mixup.hpp"

#include <torch/torch.h>

#include <cmath>

#include "ddp/data/counter_rng.hpp"

namespace examples {

double mixup_weight(double alpha, uint64_t seed, int64_t draw, int rank) {
  // Joehnk's method: keep (x, y) = (u^(1/alpha), v^(1/alpha)) if x + y <= 1. At alpha = 4 it keeps
  // one pair in seventy, which limits alpha.
  ddp::SampleRng rng(seed ^ 0x6D69787570ULL, static_cast<uint64_t>(rank),
                     static_cast<uint64_t>(draw));
  for (;;) {
    const double x = std::pow(rng.uniform(), 1.0 / alpha);
    const double y = std::pow(rng.uniform(), 1.0 / alpha);
    if (x + y <= 1.0 && x + y > 0.0) {
      return x / (x + y);
    }
  }
}

at::Tensor mix_images(const at::Tensor& images, double weight) {
  return torch::lerp(images.flip(0), images, weight);
}

ddp::ops::CrossEntropyResult classification_loss(const at::Tensor& logits, const at::Tensor& target,
                                                 double label_smoothing,
                                                 const at::Tensor& mixup_weights) {
  const ddp::ops::CrossEntropyOptions options{.label_smoothing = label_smoothing};
  auto result = ddp::ops::cross_entropy(logits, target, options);
  if (mixup_weights.defined()) {
    const auto weights = mixup_weights.to(logits.device(), /*non_blocking=*/true);
    const auto reversed = ddp::ops::cross_entropy(logits, target.flip(0), options);
    result.loss = weights[0] * result.loss + weights[1] * reversed.loss;
  }
  return result;
}

}  // namespace examples
