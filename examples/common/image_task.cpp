// SPDX-License-Identifier: Apache-2.0
#include "common/image_task.hpp"

#include <torch/torch.h>

#include <cmath>
#include <utility>

#include "ddp/core/error.hpp"
#include "ddp/data/counter_rng.hpp"

namespace examples {
namespace {

ddp::Batch images_of(const ImageBatch& batch, ddp::DataLoader<>& loader) {
  return batch.is_prepared() ? loader.device_images()->make(batch.prepared) : batch.images;
}

}  // namespace

ImageTask::ImageTask(const ImageParts& parts, const ImageSettings& settings)
    : parts_(parts), settings_(settings) {
  if (settings.mixup > kMaxMixupAlpha) {
    throw ddp::SettingsError(ddp::concat("train.mixup=", settings.mixup, " exceeds ",
                                         kMaxMixupAlpha, "; fix: set a smaller alpha"));
  }
}

ImageBatch ImageTask::load(int64_t draw) {
  auto* resident = parts_.train_loader.device_images();
  if (resident != nullptr && settings_.mixup <= 0) {
    return {.prepared = resident->prepare()};
  }
  ImageBatch batch{.images = parts_.train_loader.next()};
  if (settings_.mixup > 0) {
    const double weight = mixup_weight(settings_.mixup, settings_.seed, draw, settings_.rank);
    batch.images.data = mix_images(batch.images.data, weight);
    batch.mixup_weights = torch::tensor({weight, 1.0 - weight}, torch::kFloat32);
  }
  return batch;
}

BatchResult ImageTask::forward(const ImageBatch& batch) {
  const auto images = images_of(batch, parts_.train_loader);
  const auto logits = parts_.forward(images.data);
  auto [loss, num_correct] =
      classification_loss(logits, images.target, settings_.label_smoothing, batch.mixup_weights);
  if (settings_.weighted) {
    loss = loss * static_cast<double>(images.size());
  }
  return {.loss = loss, .num_correct = num_correct, .num_targets = {.on_host = images.size()}};
}

void ImageTask::for_each_evaluation_batch(const std::function<void(ImageBatch batch)>& evaluate) {
  if (auto* resident = parts_.eval_loader.device_images()) {
    for (int64_t left = parts_.eval_loader.batches_left(); left > 0; --left) {
      evaluate({.prepared = resident->prepare()});
    }
    return;
  }
  for (auto& batch : parts_.eval_loader) {
    evaluate({.images = batch});
  }
}

BatchResult ImageTask::evaluate(const ImageBatch& batch) {
  const auto images = images_of(batch, parts_.eval_loader);
  const auto [mean, num_correct] =
      classification_loss(parts_.forward(images.data), images.target, /*label_smoothing=*/0);
  return {.loss = mean * static_cast<double>(images.size()),
          .num_correct = num_correct,
          .num_targets = {.on_host = images.size()}};
}

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
