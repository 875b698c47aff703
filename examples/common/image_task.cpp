// SPDX-License-Identifier: Apache-2.0
#include "common/image_task.hpp"

#include <torch/torch.h>

#include <utility>

#include "common/mixup.hpp"
#include "ddp/core/error.hpp"

namespace examples {
namespace {

struct Images {
  ddp::Batch batch;
  at::Tensor mixup_weight;  // undefined: not mixed
};

const Images& of(const TrainingBatch& batch) {
  return *static_cast<const Images*>(batch.object.get());
}

TrainingBatch make_batch(ddp::Batch batch, at::Tensor mixup_weight) {
  const auto size = batch.size();
  auto images = std::make_shared<Images>(Images{std::move(batch), std::move(mixup_weight)});
  return {.object = images,
          .tensors = {&images->batch.data, &images->batch.target, &images->mixup_weight},
          .num_targets = size,
          .num_samples = size};
}

}  // namespace

ImageTask::ImageTask(const ImageParts& parts, const ImageSettings& settings)
    : parts_(parts), settings_(settings) {
  if (settings.mixup > kMaxMixupAlpha) {
    throw ddp::SettingsError(ddp::detail::concat("train.mixup = ", settings.mixup,
                                                 ": give an alpha of at most ", kMaxMixupAlpha));
  }
}

TrainingBatch ImageTask::load(int64_t draw) {
  auto images = parts_.train_loader.next();
  at::Tensor weight;
  if (settings_.mixup > 0) {
    const double mixed = mixup_weight(settings_.mixup, settings_.seed, draw, settings_.rank);
    images.data = mix_images(images.data, mixed);
    weight = torch::tensor({mixed, 1.0 - mixed}, torch::kFloat32);
  }
  return make_batch(std::move(images), std::move(weight));
}

MicroBatchResult ImageTask::forward(const TrainingBatch& batch) {
  const auto& images = of(batch);
  const auto logits = parts_.forward(images.batch.data);
  auto [loss, num_correct] = classification_loss(logits, images.batch.target,
                                                 settings_.label_smoothing, images.mixup_weight);
  if (settings_.weighted) {
    loss = loss * static_cast<double>(images.batch.size());
  }
  return {.loss = loss, .num_correct = num_correct};
}

void ImageTask::for_each_evaluation_batch(
    const std::function<void(TrainingBatch batch)>& evaluate) {
  for (auto& batch : parts_.eval_loader) {
    evaluate(make_batch(batch, {}));
  }
}

MicroBatchResult ImageTask::evaluate(const TrainingBatch& batch) {
  const auto& images = of(batch).batch;
  const auto [mean, num_correct] =
      classification_loss(parts_.forward(images.data), images.target, /*label_smoothing=*/0);
  return {.loss = mean * static_cast<double>(images.size()), .num_correct = num_correct};
}

}  // namespace examples
