// SPDX-License-Identifier: Apache-2.0
// Image classification with mixup and label smoothing.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "common/training_task.hpp"
#include "ddp/core/fields.hpp"
#include "ddp/data/data_loader.hpp"
#include "ddp/train/options.hpp"

namespace examples {

/// Objects that the task uses; all outlive the task.
struct ImageParts {
  std::function<at::Tensor(const at::Tensor&)> forward;  ///< the wrapper's forward
  ddp::DataLoader<>& train_loader;
  ddp::DataLoader<>& eval_loader;  ///< unpadded: each sample on one rank
};

struct ImageSettings {
  double mixup = 0;
  double label_smoothing = 0;
  uint64_t seed = 0;      ///< seed of mixup
  int rank = 0;           ///< rank in mixup's draws
  bool weighted = false;  ///< batch sizes differ between ranks: average over samples, not ranks
};

class ImageTask : public TrainingTask {
 public:
  /// Throws SettingsError if mixup exceeds kMaxMixupAlpha.
  ImageTask(const ImageParts& parts, const ImageSettings& settings);

  int64_t num_batches() const override { return parts_.train_loader.num_batches(); }
  bool loss_is_sum() const override { return settings_.weighted; }
  TrainingBatch load(int64_t draw) override;
  MicroBatchResult forward(const TrainingBatch& batch) override;
  void for_each_evaluation_batch(const std::function<void(TrainingBatch batch)>& evaluate) override;
  MicroBatchResult evaluate(const TrainingBatch& batch) override;

 private:
  ImageParts parts_;
  ImageSettings settings_;
};

/// Sections of a program that trains this task in a TrainingLoop: section model, and all of section
/// train.
std::vector<ddp::Section> image_sections();

}  // namespace examples
