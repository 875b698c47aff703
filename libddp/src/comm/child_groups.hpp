// SPDX-License-Identifier: Apache-2.0
// The groups split from one communicator, which abort with their parent.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

/// Any thread.
class ChildGroups {
 public:
  void add(const CommunicatorPtr& child) {
    const std::lock_guard lock(mutex_);
    std::erase_if(children_, [](const auto& other) { return other.expired(); });
    children_.push_back(child);
  }

  void abort(const std::string& reason) {
    // Aborting a child may take seconds, so it happens without the lock.
    const auto children = [this] {
      const std::lock_guard lock(mutex_);
      return children_;
    }();
    for (const auto& weak : children) {
      if (const auto child = weak.lock()) {
        child->abort(reason);
      }
    }
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Communicator>> children_;
};

}  // namespace ddp::detail
