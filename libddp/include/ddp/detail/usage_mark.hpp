// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>

namespace ddp::detail {

/// Set when a library object was constructed with these options. Copies share it. Options made by a
/// program have none, and set() does nothing. May be called from any thread.
class UsageMark {
 public:
  static UsageMark make() {
    UsageMark mark;
    mark.uses_ = std::make_shared<Uses>();
    return mark;
  }
  void set() const {
    if (uses_) {
      uses_->is_set.store(true, std::memory_order_relaxed);
    }
  }
  /// Also keeps what the object made of the options, as a loader's batch size of all ranks.
  void record(int64_t value) const {
    set();
    if (uses_) {
      const std::lock_guard lock(uses_->mutex);
      uses_->values.insert(value);
    }
  }
  bool is_set() const { return uses_ && uses_->is_set.load(std::memory_order_relaxed); }
  /// The values of all objects that received these options.
  std::set<int64_t> values() const {
    if (!uses_) {
      return {};
    }
    const std::lock_guard lock(uses_->mutex);
    return uses_->values;
  }

 private:
  struct Uses {
    std::atomic<bool> is_set = false;
    std::mutex mutex;
    std::set<int64_t> values;
  };
  std::shared_ptr<Uses> uses_;
};

}  // namespace ddp::detail
