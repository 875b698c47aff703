// SPDX-License-Identifier: Apache-2.0
#pragma once

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
  void set() const { set(0); }
  /// `value` is what the object made of the options, as a loader's batch size of all ranks.
  void set(int64_t value) const {
    if (uses_) {
      const std::lock_guard lock(uses_->mutex);
      uses_->values.insert(value);
    }
  }
  bool is_set() const { return !values().empty(); }
  /// Of all objects.
  std::set<int64_t> values() const {
    if (!uses_) {
      return {};
    }
    const std::lock_guard lock(uses_->mutex);
    return uses_->values;
  }

 private:
  struct Uses {
    std::mutex mutex;
    std::set<int64_t> values;
  };
  std::shared_ptr<Uses> uses_;
};

}  // namespace ddp::detail
