// SPDX-License-Identifier: Apache-2.0
// Host to device copies on a stream of their own.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace ddp::detail {

class DeviceCopier {
 public:
  virtual ~DeviceCopier() = default;
  /// Starts copying and replaces each tensor by the one on the device. The host memory must stay as
  /// it is until finish_oldest().
  virtual void start(const std::vector<at::Tensor*>& tensors) = 0;
  /// Does `work` on the copy stream, which may read host memory until finish_oldest().
  virtual void start(const std::function<void()>& work) = 0;
  /// The current stream waits for the oldest copy not yet joined, whose device tensors these are.
  virtual void join(const std::vector<at::Tensor*>& tensors) = 0;
  /// Copies whose host memory may still be read.
  virtual int num_unfinished() const = 0;
  /// Whether the oldest of them has left the host memory; never blocks.
  virtual bool oldest_finished() = 0;
  /// The host waits for it and forgets it.
  virtual void finish_oldest() = 0;
  /// The host waits for all copies; those not joined are forgotten.
  virtual void reset() = 0;
};

/// nullptr where the device is the CPU. Throws SettingsError where this build has no CUDA.
std::unique_ptr<DeviceCopier> make_device_copier(at::Device device);

}  // namespace ddp::detail
