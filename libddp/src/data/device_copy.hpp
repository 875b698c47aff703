// SPDX-License-Identifier: Apache-2.0
// Host to device copies on a separate stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace ddp::detail {

class DeviceCopier {
 public:
  virtual ~DeviceCopier() = default;
  /// Starts a copy and replaces each tensor by its device tensor. The host memory must stay
  /// unchanged until finish_oldest().
  virtual void start(const std::vector<at::Tensor*>& tensors) = 0;
  /// Runs `work` on the copy stream. It may read host memory until finish_oldest().
  virtual void start(const std::function<void()>& work) = 0;
  /// The current stream waits for the oldest copy not yet joined. `tensors` are its device tensors.
  virtual void join(const std::vector<at::Tensor*>& tensors) = 0;
  /// Copies whose host memory may still be read.
  virtual int num_unfinished() const = 0;
  /// Whether the oldest unfinished copy is done with the host memory; never blocks.
  virtual bool oldest_finished() = 0;
  /// The host waits for the oldest unfinished copy and forgets that copy.
  virtual void finish_oldest() = 0;
  /// The host waits for all copies and forgets those not joined.
  virtual void reset() = 0;
};

/// Returns nullptr for the CPU. Throws SettingsError in a build without CUDA.
std::unique_ptr<DeviceCopier> make_device_copier(at::Device device);

}  // namespace ddp::detail
