// SPDX-License-Identifier: Apache-2.0
// The device's copy of a step's numbers. One kernel writes them at the start of each step.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "ddp/train/graphed_step.hpp"
#include "train/graph/step_kernels.hpp"

namespace ddp::detail {

/// [0] lr, [1] step, then the contents of small tensors of the batch.
class StepFeed {
 public:
  static constexpr int kFirstFree = 2;

  explicit StepFeed(at::Device device);
  at::Device device() const { return memory_.device(); }
  /// The learning rate and the step's index as tensors of the device.
  StepScalars scalars() const;
  /// The numbers from `index` on, as a tensor with the sizes of `like`.
  at::Tensor numbers_like(const at::Tensor& like, int index) const;
  /// The number of the step that was fed last.
  const uint64_t* sequence() const;

  /// Arguments of a kernel that writes this feed, without contents.
  FeedArguments arguments() const;
  /// Feeds an eager step: small float32 CPU tensors among `inputs` become views of the feed; others
  /// stay unchanged.
  void feed(const StepNumbers& numbers, uint64_t sequence,
            const std::vector<at::Tensor*>& inputs) const;

 private:
  at::Tensor memory_;   // sequence, then numbers
  at::Tensor numbers_;  // float32 [kMaxFeedNumbers]
};

/// Replaces the contents of `arguments` by a step's numbers. Batches are appended next.
void set_step_numbers(const StepNumbers& numbers, uint64_t sequence, FeedArguments& arguments);
/// Throws SettingsError unless the CPU tensor fits into a feed from index `first` on.
void require_fed(const at::Tensor& tensor, int first);
/// Appends the contents of a CPU tensor; returns their index.
int append_numbers(const at::Tensor& tensor, FeedArguments& arguments);
/// Appends a copy on the device. Input already at `to` is not copied.
void append_copy(const at::Tensor& from, void* to, FeedArguments& arguments);

}  // namespace ddp::detail
