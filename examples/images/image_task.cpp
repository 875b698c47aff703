// SPDX-License-Identifier: Apache-2.0
#include "images/image_task.hpp"

#include <torch/torch.h>

#include <utility>

namespace examples {
namespace {

ddp::Batch images_of(const ImageBatch& batch, ddp::DataLoader<>& loader) {
  return batch.is_prepared() ? loader.device_images()->make(batch.prepared) : batch.images;
}

/// Adds to `counts` in place, so a captured step can do it.
void add_class_counts(const at::Tensor& logits, const at::Tensor& target, at::Tensor counts) {
  const auto is_class = target.unsqueeze(1).eq(torch::arange(counts.size(1), target.options()));
  const auto is_correct = logits.argmax(1).eq(target);
  counts += torch::stack({is_class.logical_and(is_correct.unsqueeze(1)).sum(0), is_class.sum(0)});
}

}  // namespace

ImageTask::ImageTask(const ImageParts& parts, const ImageSettings& settings)
    : parts_(parts), settings_(settings) {}

ImageBatch ImageTask::load(int64_t draw) {
  auto* resident = parts_.train_loader.device_images();
  if (resident != nullptr && !settings_.mix.is_on()) {
    return {.prepared = resident->prepare()};
  }
  ImageBatch batch{.images = parts_.train_loader.next()};
  if (settings_.mix.is_on()) {
    at::Tensor& images = batch.images.data;
    const ImageMix mix = draw_image_mix(settings_.mix, draw, images.size(2), images.size(3));
    images = mix_images(images, mix);
    batch.mix_weights = torch::tensor({mix.weight, 1.0 - mix.weight}, torch::kFloat32);
  }
  return batch;
}

ddp::ops::CrossEntropyResult ImageTask::mean_loss(const ddp::Batch& images, double label_smoothing,
                                                  const at::Tensor& mix_weights) const {
  if (parts_.own_loss) {
    return {.loss = parts_.own_loss(images), .num_correct = {}};
  }
  const auto logits = parts_.forward(images.data);
  return classification_loss(logits, images.target, label_smoothing, mix_weights);
}

BatchResult ImageTask::forward(const ImageBatch& batch) {
  const auto images = images_of(batch, parts_.train_loader);
  auto [loss, num_correct] = mean_loss(images, settings_.label_smoothing, batch.mix_weights);
  if (settings_.weighted) {
    loss = loss * static_cast<double>(images.size());
  }
  return {.loss = loss, .num_correct = num_correct, .num_targets = {.on_host = images.size()}};
}

void ImageTask::for_each_evaluation_batch(const std::function<bool(ImageBatch batch)>& evaluate) {
  if (auto* resident = parts_.eval_loader.device_images()) {
    bool goes_on = true;
    for (int64_t left = parts_.eval_loader.batches_left(); left > 0 && goes_on; --left) {
      goes_on = evaluate({.prepared = resident->prepare()});
    }
    return;
  }
  for (auto& batch : parts_.eval_loader) {
    if (!evaluate({.images = batch})) {
      return;
    }
  }
}

BatchResult ImageTask::evaluate(const ImageBatch& batch) {
  const auto images = images_of(batch, parts_.eval_loader);
  ddp::ops::CrossEntropyResult result;
  if (parts_.class_counts.defined() && !parts_.own_loss) {
    const auto logits = parts_.forward(images.data);
    add_class_counts(logits, images.target, parts_.class_counts);
    result = classification_loss(logits, images.target, /*label_smoothing=*/0);
  } else {
    result = mean_loss(images, /*label_smoothing=*/0, {});
  }
  return {.loss = result.loss * static_cast<double>(images.size()),
          .num_correct = result.num_correct,
          .num_targets = {.on_host = images.size()}};
}

ddp::ops::CrossEntropyResult classification_loss(const at::Tensor& logits, const at::Tensor& target,
                                                 double label_smoothing,
                                                 const at::Tensor& mix_weights) {
  const ddp::ops::CrossEntropyOptions options{.label_smoothing = label_smoothing};
  auto result = ddp::ops::cross_entropy(logits, target, options);
  if (mix_weights.defined()) {
    const auto weights = mix_weights.to(logits.device(), /*non_blocking=*/true);
    const auto reversed = ddp::ops::cross_entropy(logits, target.flip(0), options);
    result.loss = weights[0] * result.loss + weights[1] * reversed.loss;
    result.num_correct =
        torch::where(weights[0].ge(weights[1]), result.num_correct, reversed.num_correct);
  }
  return result;
}

}  // namespace examples
