// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <utility>

#include "core/rank_position.hpp"

namespace ddp::detail {

/// Reads the position of an object without owning it, so the control plane's thread never destroys
/// the object.
class RevocableProbe {
 public:
  explicit RevocableProbe(std::function<GroupPosition()> read) : read_(std::move(read)) {}

  /// Returns nothing after revoke().
  std::optional<GroupPosition> read() {
    const std::lock_guard lock(mutex_);
    return read_ ? std::optional(read_()) : std::nullopt;
  }
  /// The object's destructor calls this first. Waits for a read() in progress.
  void revoke() {
    const std::lock_guard lock(mutex_);
    read_ = nullptr;
  }

 private:
  std::mutex mutex_;
  std::function<GroupPosition()> read_;
};

}  // namespace ddp::detail
