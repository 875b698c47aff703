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

/// Where the scalars of the latest steps wait for the host. CUDA: mapped host memory that the last
/// kernel of each step writes; the host looks there without a CUDA call.
class StepRing : public std::enable_shared_from_this<StepRing> {
 public:
  static constexpr int kNumSlots = 2 * StepLog::kMaxStepsAhead;

  /// `check` throws where waiting has become pointless: a peer failed, the device is in error.
  StepRing(at::Device device, std::function<void()> check);
  ~StepRing();
  StepRing(const StepRing&) = delete;
  StepRing& operator=(const StepRing&) = delete;

  /// The tensors among `outputs` that have one element. Throws SettingsError where they are more
  /// than StepLog::kMaxScalars or of a type that is no number.
  static std::vector<at::Tensor> scalars_of(const std::vector<at::Tensor>& outputs);

  /// CUDA: enqueues the kernel that writes `scalars`; `sequence` (uint64 on the device) says of
  /// which step. May be captured.
  void publish(const std::vector<at::Tensor>& scalars, const uint64_t* sequence) const;
  /// The log of step `sequence`, published or to be.
  StepLog log(uint64_t sequence, int num_scalars) const;
  /// CPU: the numbers themselves.
  static StepLog log_now(const std::vector<at::Tensor>& scalars);

  /// Before step `sequence` is enqueued: the host waits where it is too far ahead. From here on
  /// the place of the step kNumSlots before it may be written.
  void begin(uint64_t sequence);
  bool is_ready(uint64_t sequence) const;
  /// The host waits until step `sequence` has ended.
  void wait(uint64_t sequence) const;
  double value(uint64_t sequence, int index) const;

 private:
  at::Device device_;
  std::function<void()> check_;
  PublishedSlot* slots_ = nullptr;   // [kNumSlots]
  std::atomic<uint64_t> latest_{0};  // begun
};

}  // namespace ddp::detail
