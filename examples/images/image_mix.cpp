// SPDX-License-Identifier: Apache-2.0
#include "images/image_mix.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "ddp/data/sample_rng.hpp"

namespace examples {
namespace {

// A draw from Beta(alpha, alpha) by Joehnk's method: keep (x, y) = (u^(1/alpha), v^(1/alpha)) if
// x + y <= 1. At alpha = 4, the settings' limit, it keeps one pair in seventy.
double draw_beta(ddp::SampleRng& rng, double alpha) {
  for (;;) {
    const double x = std::pow(rng.uniform(), 1.0 / alpha);
    const double y = std::pow(rng.uniform(), 1.0 / alpha);
    if (x + y <= 1.0 && x + y > 0.0) {
      return x / (x + y);
    }
  }
}

}  // namespace

ImageMix draw_image_mix(const ImageMixSettings& settings, int64_t draw, int64_t height,
                        int64_t width) {
  ddp::SampleRng rng(settings.seed ^ 0x6D69787570ULL, static_cast<uint64_t>(settings.rank),
                     static_cast<uint64_t>(draw));
  const bool cuts = settings.cutmix > 0 && (settings.mixup <= 0 || rng.coin());
  if (!cuts) {
    return {.weight = draw_beta(rng, settings.mixup)};
  }
  const double lambda = draw_beta(rng, settings.cutmix);
  const int64_t centre_x = rng.below(static_cast<uint32_t>(width));
  const int64_t centre_y = rng.below(static_cast<uint32_t>(height));
  return cut_mix(lambda, centre_x, centre_y, height, width);
}

ImageMix cut_mix(double lambda, int64_t centre_x, int64_t centre_y, int64_t height, int64_t width) {
  const double half_side = 0.5 * std::sqrt(1.0 - lambda);
  const auto half_width = static_cast<int64_t>(half_side * static_cast<double>(width));
  const auto half_height = static_cast<int64_t>(half_side * static_cast<double>(height));
  const PixelBox box{.left = std::max<int64_t>(centre_x - half_width, 0),
                     .top = std::max<int64_t>(centre_y - half_height, 0),
                     .right = std::min(centre_x + half_width, width),
                     .bottom = std::min(centre_y + half_height, height)};
  const int64_t num_cut = (box.right - box.left) * (box.bottom - box.top);
  return {.weight = 1.0 - static_cast<double>(num_cut) / static_cast<double>(width * height),
          .box = box};
}

at::Tensor mix_images(const at::Tensor& images, const ImageMix& mix) {
  if (!mix.box) {
    return torch::lerp(images.flip(0), images, mix.weight);
  }
  const auto inside = [&](const at::Tensor& batch) {
    return batch.slice(2, mix.box->top, mix.box->bottom).slice(3, mix.box->left, mix.box->right);
  };
  at::Tensor mixed = images.clone();
  inside(mixed).copy_(inside(images).flip(0));
  return mixed;
}

}  // namespace examples
