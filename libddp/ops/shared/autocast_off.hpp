// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/autocast_mode.h>

namespace ddp::ops {

/// Disables autocast for one device type in a scope. Backward runs with the autocast state of its
/// forward. Gradient arithmetic (backward functions of ops, bucket arithmetic, comm hooks) needs
/// its own dtypes.
class AutocastOff {
 public:
  explicit AutocastOff(at::DeviceType device_type)
      : device_type_(device_type), was_enabled_(at::autocast::is_autocast_enabled(device_type)) {
    if (was_enabled_) {
      at::autocast::set_autocast_enabled(device_type_, false);
    }
  }
  ~AutocastOff() {
    if (was_enabled_) {
      at::autocast::set_autocast_enabled(device_type_, true);
    }
  }
  AutocastOff(const AutocastOff&) = delete;
  AutocastOff& operator=(const AutocastOff&) = delete;

 private:
  at::DeviceType device_type_;
  bool was_enabled_;
};

}  // namespace ddp::ops
