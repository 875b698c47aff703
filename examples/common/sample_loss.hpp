// SPDX-License-Identifier: Apache-2.0
// Losses of a model's output and the target in the data.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ddp/ops/vision.hpp"
#include "ddp/train/config.hpp"

namespace examples {

enum class LossKind { CrossEntropy, Mse, L1, Bce, InGraph };
std::string name_of(LossKind kind);  ///< "mse"
/// The values of model.loss.
const std::vector<std::pair<std::string, LossKind>>& loss_names();

/// Throws SettingsError for settings that need classes, which only cross entropy has.
void check_loss_settings(LossKind kind, const ddp::Config& cfg);

/// Label of elements that are not in the cross entropy, as in PyTorch.
inline constexpr int64_t kIgnoredTarget = -100;

/// What is known of a data set's target before training.
struct TargetFacts {
  int64_t num_classes = 0;     ///< cross entropy: the largest label + 1
  bool has_ignored = false;    ///< cross entropy: some labels are kIgnoredTarget
  int64_t num_per_sample = 1;  ///< cross entropy: labels of one sample
};
/// Checks the target [rows, …] of a file. Throws DataError naming `source` for labels below 0 or a
/// dtype that the loss does not take.
TargetFacts check_target(LossKind kind, const at::Tensor& target, const std::string& source);

/// The targets over which a batch's mean is: labels that are not ignored with cross entropy, else
/// samples. `target` is on the CPU.
int64_t count_targets(const TargetFacts& facts, const at::Tensor& target);

/// The mean loss, and the hits, which are undefined without classes.
///
///   cross_entropy  output [N, classes, …], target int64 [N, …]: over targets that are not ignored
///   mse, l1, bce   output and target of one shape, except dimensions of size 1: over all elements
///
/// A batch whose targets are all ignored has the loss 0. Throws SettingsError for other shapes,
/// DataError if the output has fewer classes than the labels.
ddp::ops::CrossEntropyResult sample_loss(LossKind kind, const at::Tensor& output,
                                         const at::Tensor& target, const TargetFacts& facts,
                                         double label_smoothing);

}  // namespace examples
