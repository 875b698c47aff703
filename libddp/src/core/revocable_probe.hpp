// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <utility>

#include "core/rank_position.hpp"

namespace ddp::detail {

/// Reads the position of an object that it does not own, so the object is never destroyed on the
/// thread of the control plane.
class RevocableProbe {
 public:
  explicit RevocableProbe(std::function<GroupPosition()> read) : read_(std::move(read)) {}

  /// Nothing after revoke().
  std::optional<GroupPosition> read() {
    const std::lock_guard lock(mutex_);
    return read_ ? std::optional(read_()) : std::nullopt;
  }
  /// The object's destructor calls it first. Waits for a read() in progress.
  void revoke() {
    const std::lock_guard lock(mutex_);
    read_ = nullptr;
  }

 private:
  std::mutex mutex_;
  std::function<GroupPosition()> read_;
};

}  // namespace ddp::detail
