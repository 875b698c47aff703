// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "ddp/train/step_log.hpp"
#include "train/graph/published_slot.hpp"

namespace ddp::detail {

/// Holds the scalars of the latest steps for the host. The device writes each step's scalars into a
/// slot, and the host polls the slot without a CUDA call.
class StepRing : public std::enable_shared_from_this<StepRing> {
 public:
  static constexpr int kNumSlots = 2 * StepLog::kMaxStepsAhead;
  using Slots = std::unique_ptr<PublishedSlot[], void (*)(PublishedSlot*)>;

  /// `slots` are kNumSlots slots of zeros. `check` throws if waiting is pointless: a peer failed,
  /// or the device is in error.
  StepRing(Slots slots, std::function<void()> check);

  /// The one-element tensors of `outputs`. Throws SettingsError for more than StepLog::kMaxScalars
  /// of them.
  static std::vector<at::Tensor> scalars_of(const std::vector<at::Tensor>& outputs);
  /// A log of these scalars, for steps on the CPU.
  static StepLog log_now(const std::vector<at::Tensor>& scalars);

  /// The log of step `sequence`, which may be unpublished yet.
  StepLog log(uint64_t sequence, int num_scalars) const;
  /// Where the device writes.
  PublishedSlot* slots() const { return slots_.get(); }

  /// Call before step `sequence` is enqueued: the host waits if it is too far ahead. Afterwards the
  /// slot of the step kNumSlots earlier may be overwritten.
  void begin(uint64_t sequence);
  bool is_ready(uint64_t sequence) const;
  /// The host waits until step `sequence` has finished.
  void wait(uint64_t sequence) const;
  double value(uint64_t sequence, int index) const;

 private:
  const Slots slots_;
  const std::function<void()> check_;
  std::atomic<uint64_t> latest_{0};  // number of the last begun step
};

}  // namespace ddp::detail
