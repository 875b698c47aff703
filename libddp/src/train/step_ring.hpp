// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "ddp/train/step_log.hpp"

namespace ddp::detail {

struct PublishedSlot;

/// Holds the scalars of the latest steps for the host. CUDA: mapped host memory that each step's
/// last kernel writes; the host polls it without a CUDA call.
class StepRing : public std::enable_shared_from_this<StepRing> {
 public:
  static constexpr int kNumSlots = 2 * StepLog::kMaxStepsAhead;

  /// `check` throws if waiting is pointless: a peer failed, or the device is in error.
  StepRing(at::Device device, std::function<void()> check);
  ~StepRing();
  StepRing(const StepRing&) = delete;
  StepRing& operator=(const StepRing&) = delete;

  /// The one-element tensors of `outputs`. Throws SettingsError for more than StepLog::kMaxScalars
  /// of them or non-numeric types.
  static std::vector<at::Tensor> scalars_of(const std::vector<at::Tensor>& outputs);

  /// CUDA: enqueues the kernel that writes `scalars`; `sequence` (uint64 on the device) is the
  /// step's number. Capturable.
  void publish(const std::vector<at::Tensor>& scalars, const uint64_t* sequence) const;
  /// The log of step `sequence`, which may be unpublished yet.
  StepLog log(uint64_t sequence, int num_scalars) const;
  /// CPU: the numbers themselves.
  static StepLog log_now(const std::vector<at::Tensor>& scalars);

  /// Call before step `sequence` is enqueued: the host waits if it is too far ahead. Afterwards the
  /// slot of the step kNumSlots earlier may be overwritten.
  void begin(uint64_t sequence);
  bool is_ready(uint64_t sequence) const;
  /// The host waits until step `sequence` has finished.
  void wait(uint64_t sequence) const;
  double value(uint64_t sequence, int index) const;

 private:
  at::Device device_;
  std::function<void()> check_;
  PublishedSlot* slots_ = nullptr;   // [kNumSlots]
  std::atomic<uint64_t> latest_{0};  // number of the last begun step
};

}  // namespace ddp::detail
