// SPDX-License-Identifier: Apache-2.0
#include "common/image_task.hpp"

#include <torch/torch.h>

#include <utility>

#include "common/mixup.hpp"
#include "ddp/core/error.hpp"

namespace examples {
namespace {

torch::Tensor count_hits(const torch::Tensor& logits, const torch::Tensor& target) {
  return logits.detach().argmax(1).eq(target).sum();
}

}  // namespace

ImageTask::ImageTask(const ImageParts& parts, const ImageSettings& settings)
    : parts_(parts), settings_(settings) {
  if (settings.mixup > kMaxMixupAlpha) {
    throw ddp::SettingsError(ddp::detail::concat("train.mixup = ", settings.mixup,
                                                 ": give an alpha of at most ", kMaxMixupAlpha));
  }
}

void ImageTask::load(int64_t draw) {
  batch_ = parts_.train_loader.next();
  if (settings_.mixup > 0) {
    mixup_weight_ = mixup_weight(settings_.mixup, settings_.seed, draw, settings_.rank);
    batch_.data = mix_images(batch_.data, mixup_weight_);
  }
}

MicroBatchResult ImageTask::forward() {
  const auto batch = std::exchange(batch_, {});
  const auto logits = parts_.forward(batch.data);
  auto loss = classification_loss(logits, batch.target, settings_.label_smoothing, mixup_weight_);
  if (settings_.weighted) {
    loss = loss * static_cast<double>(batch.size());
  }
  return {.loss = loss,
          .num_correct = count_hits(logits, batch.target),
          .num_targets = batch.size(),
          .num_samples = batch.size()};
}

void ImageTask::evaluate(EvaluationSums& sums) {
  for (auto& batch : parts_.eval_loader) {
    const auto logits = parts_.forward(batch.data);
    sums.add(torch::cross_entropy_loss(logits, batch.target, {}, at::Reduction::Sum),
             count_hits(logits, batch.target), batch.size());
  }
}

}  // namespace examples
