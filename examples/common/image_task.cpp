// SPDX-License-Identifier: Apache-2.0
#include "common/image_task.hpp"

#include <torch/torch.h>

#include <utility>

#include "common/mixup.hpp"
#include "common/model_options.hpp"
#include "ddp/core/error.hpp"

namespace examples {
namespace {

/// Either the images, or a description from which the step makes them.
struct Images {
  ddp::Batch batch;
  at::Tensor mixup_weight;  // undefined: no mixup
  ddp::PreparedBatch prepared;
};

const Images& of(const TrainingBatch& batch) {
  return *static_cast<const Images*>(batch.object.get());
}

TrainingBatch make_batch(Images images, int64_t size) {
  auto kept = std::make_shared<Images>(std::move(images));
  return {.object = kept,
          .tensors = {&kept->batch.data, &kept->batch.target, &kept->mixup_weight,
                      &kept->prepared.place},
          .num_targets = size,
          .num_samples = size,
          .host_numbers = {size}};
}

TrainingBatch make_batch(ddp::Batch batch, at::Tensor mixup_weight) {
  const auto size = batch.size();
  return make_batch({std::move(batch), std::move(mixup_weight), {}}, size);
}

/// Prepares a batch of a data set in GPU memory; the step's first kernel makes the images.
TrainingBatch prepare_batch(ddp::DeviceImageLoader& loader) {
  auto prepared = loader.prepare();
  const auto size = prepared.size;
  return make_batch({{}, {}, std::move(prepared)}, size);
}

ddp::Batch made_by_step(const Images& images, ddp::DataLoader<>& loader) {
  const bool prepared = images.prepared.place.defined();
  return prepared ? loader.device_images()->make(images.prepared) : images.batch;
}

}  // namespace

std::vector<ddp::Section> image_sections() {
  return {ddp::declare_section<ModelOptions>("model"), ddp::uses({"train"})};
}

ImageTask::ImageTask(const ImageParts& parts, const ImageSettings& settings)
    : parts_(parts), settings_(settings) {
  if (settings.mixup > kMaxMixupAlpha) {
    throw ddp::SettingsError(ddp::concat("train.mixup = ", settings.mixup,
                                         ": give an alpha of at most ", kMaxMixupAlpha));
  }
}

TrainingBatch ImageTask::load(int64_t draw) {
  auto* resident = parts_.train_loader.device_images();
  if (resident != nullptr && settings_.mixup <= 0) {
    return prepare_batch(*resident);
  }
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
  const auto made = made_by_step(images, parts_.train_loader);
  const auto logits = parts_.forward(made.data);
  auto [loss, num_correct] =
      classification_loss(logits, made.target, settings_.label_smoothing, images.mixup_weight);
  if (settings_.weighted) {
    loss = loss * static_cast<double>(made.size());
  }
  return {.loss = loss, .num_correct = num_correct};
}

void ImageTask::for_each_evaluation_batch(
    const std::function<void(TrainingBatch batch)>& evaluate) {
  if (auto* resident = parts_.eval_loader.device_images()) {
    for (int64_t left = parts_.eval_loader.batches_left(); left > 0; --left) {
      evaluate(prepare_batch(*resident));
    }
    return;
  }
  for (auto& batch : parts_.eval_loader) {
    evaluate(make_batch(batch, {}));
  }
}

MicroBatchResult ImageTask::evaluate(const TrainingBatch& batch) {
  const auto images = made_by_step(of(batch), parts_.eval_loader);
  const auto [mean, num_correct] =
      classification_loss(parts_.forward(images.data), images.target, /*label_smoothing=*/0);
  return {.loss = mean * static_cast<double>(images.size()), .num_correct = num_correct};
}

}  // namespace examples
