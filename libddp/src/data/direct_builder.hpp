// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "ddp/data/dataset.hpp"
#include "ddp/detail/prefetch_source.hpp"

namespace ddp::detail {

/// Writes examples of a Dataset with a layout straight into one tensor per slot, optionally
/// page-locked.
class DirectBuilder final : public BatchBuilder<Batch> {
 public:
  DirectBuilder(std::shared_ptr<const Dataset> dataset, int num_slots, int64_t max_batch,
                bool pinned);
  void resize(int slot, int64_t num_samples) override;
  void fill(int slot, int64_t place, int64_t index, int64_t epoch) override;
  void finish(int) override {}
  /// [N, shape…] and [N]. Page-locked memory is valid until the slot's next resize(). Other memory
  /// belongs to the caller as long as a view of it exists.
  Batch take(int slot) override;

 private:
  struct Slot {
    at::Tensor data;    // [max_batch, shape…] in memory order
    at::Tensor target;  // [max_batch]
    int64_t num_samples = 0;
    float* data_pointer = nullptr;
    int64_t* target_pointer = nullptr;
  };
  void allocate(Slot& slot, int64_t num_samples) const;
  static bool may_reuse(const Slot& slot, int64_t num_samples);

  std::shared_ptr<const Dataset> dataset_;
  ExampleLayout layout_;
  std::vector<int64_t> memory_shape_;
  int64_t num_values_ = 1;
  bool pinned_;
  std::vector<Slot> slots_;
};

}  // namespace ddp::detail
