// SPDX-License-Identifier: Apache-2.0
#include "core/progress_tracker.hpp"

#include <utility>

#include "ddp/core/error.hpp"

namespace ddp::detail {

void ProgressTracker::set(int64_t step, const std::string& where) {
  {
    const std::lock_guard lock(mutex_);
    if (step == progress_.step && where == progress_.where) {
      return;
    }
    progress_.step = step;
    progress_.where = where;
    if (!mark_unsent()) {
      return;
    }
  }
  sender_->notify();
}

std::string ProgressTracker::set_activity(std::string activity) {
  {
    const std::lock_guard lock(mutex_);
    activity_.swap(activity);
    if (!mark_unsent()) {
      return activity;
    }
  }
  sender_->notify();
  return activity;
}

// Returns whether the sender must be notified: one wake-up covers all changes until it takes them.
bool ProgressTracker::mark_unsent() {
  return sender_ != nullptr && !std::exchange(is_unsent_, true);
}

std::string ProgressTracker::activity() const {
  const std::lock_guard lock(mutex_);
  return activity_;
}

Progress ProgressTracker::get() const {
  const std::lock_guard lock(mutex_);
  return current();
}

Progress ProgressTracker::current() const {
  auto progress = progress_;
  if (!activity_.empty()) {
    progress.where += concat(progress.where.empty() ? "" : ", ", activity_);
  }
  return progress;
}

std::optional<SteadyTime> ProgressTracker::due() const {
  const std::lock_guard lock(mutex_);
  return is_unsent_ ? std::optional(due_) : std::nullopt;
}

std::optional<Progress> ProgressTracker::take_due(SteadyTime now) {
  const std::lock_guard lock(mutex_);
  if (now < due_ || !std::exchange(is_unsent_, false)) {
    return std::nullopt;
  }
  due_ = now + interval_;
  return current();
}

}  // namespace ddp::detail
