// SPDX-License-Identifier: Apache-2.0
// Image classification with mixup, CutMix and label smoothing.
#pragma once

#include <cstdint>
#include <functional>

#include "common/training_task.hpp"
#include "ddp/data/data_loader.hpp"
#include "ddp/ops/vision.hpp"
#include "ddp/train/options.hpp"
#include "images/image_mix.hpp"

namespace examples {

/// Either loaded images, or (of a data set in GPU memory) a description from which the step's first
/// kernel makes them.
struct ImageBatch {
  ddp::Batch images = {};
  at::Tensor mix_weights = {};  ///< float32 {weight, 1 - weight} of the ImageMix; undefined: none
  ddp::PreparedBatch prepared = {};

  bool is_prepared() const { return prepared.place.defined(); }
  int64_t size() const { return is_prepared() ? prepared.size : images.size(); }
  int64_t num_targets() const { return size(); }
  int64_t num_samples() const { return size(); }
};
inline void for_each_tensor(ImageBatch& batch, const ddp::TensorVisitor& visit) {
  visit(batch.images.data);
  visit(batch.images.target);
  visit(batch.mix_weights);
  visit(batch.prepared.place);
  visit(batch.size());
}

/// Objects that the task uses; all outlive the task.
struct ImageParts {
  std::function<at::Tensor(const at::Tensor&)> forward;  ///< the wrapper's forward
  ddp::DataLoader<>& train_loader;
  ddp::DataLoader<>& eval_loader;  ///< unpadded: each sample on one rank
  /// Of a model that computes its mean loss from images and targets. `forward` and the settings of
  /// mixing and smoothing are unused then, and there is no accuracy.
  std::function<at::Tensor(const ddp::Batch&)> own_loss = {};
  /// int64 [2, classes] on the device: evaluations without own_loss add this rank's correct answers
  /// and images of each class. Undefined: they do not.
  at::Tensor class_counts = {};
};

struct ImageSettings {
  ImageMixSettings mix = {};
  double label_smoothing = 0;
  bool weighted = false;  ///< batch sizes differ between ranks: average over samples, not ranks
};

class ImageTask : public TrainingTask<ImageBatch> {
 public:
  /// Throws SettingsError if settings.mix is invalid.
  ImageTask(const ImageParts& parts, const ImageSettings& settings);

  int64_t num_batches() const override { return parts_.train_loader.num_batches(); }
  bool loss_is_sum() const override { return settings_.weighted; }
  ImageBatch load(int64_t draw) override;
  BatchResult forward(const ImageBatch& batch) override;
  void for_each_evaluation_batch(const std::function<bool(ImageBatch batch)>& evaluate) override;
  BatchResult evaluate(const ImageBatch& batch) override;

 private:
  ddp::ops::CrossEntropyResult mean_loss(const ddp::Batch& images, double label_smoothing,
                                         const at::Tensor& mix_weights) const;

  ImageParts parts_;
  ImageSettings settings_;
};

/// Returns the mean cross entropy of the batch and the number of correct targets. With
/// `mix_weights`, float32 {weight, 1 - weight}, the loss is that of the images mixed by mix_images:
/// weight * loss(target) + (1 - weight) * loss(target reversed). The number counts the labels of
/// the larger weight, as torchvision's training script does.
ddp::ops::CrossEntropyResult classification_loss(const at::Tensor& logits, const at::Tensor& target,
                                                 double label_smoothing,
                                                 const at::Tensor& mix_weights = {});

}  // namespace examples
