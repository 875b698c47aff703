// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>

namespace ddp::detail {

/// Set when a library object was constructed with these options. Copies share it. Options made by a
/// program have none, and set() does nothing.
class UsageMark {
 public:
  static UsageMark make() {
    UsageMark mark;
    mark.used_ = std::make_shared<std::atomic<bool>>(false);
    return mark;
  }
  /// May be called from any thread.
  void set() const {
    if (used_) {
      used_->store(true, std::memory_order_relaxed);
    }
  }
  bool is_set() const { return used_ && used_->load(std::memory_order_relaxed); }

 private:
  std::shared_ptr<std::atomic<bool>> used_;
};

}  // namespace ddp::detail
