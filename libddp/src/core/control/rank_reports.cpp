// SPDX-License-Identifier: Apache-2.0
#include "core/control/rank_reports.hpp"

#include <algorithm>
#include <utility>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

// An unchanged position is sent once per this many polls.
constexpr int kPollsPerMessage = 10;

}  // namespace

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

// Returns whether the sender must be notified. One wake-up covers all changes until it takes them.
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
  progress.step = training_.step_of(progress.step);
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
  if (sender_ == nullptr || now < due_) {
    return std::nullopt;
  }
  // A step that nobody announced wakes nobody, so the sender looks at each of its turns.
  auto progress = current();
  if (!std::exchange(is_unsent_, false) && progress.step == sent_step_) {
    return std::nullopt;
  }
  due_ = now + interval_;
  sent_step_ = progress.step;
  return progress;
}

PositionReporter::PositionReporter(const ProgressTracker& progress,
                                   std::chrono::milliseconds heartbeat_interval)
    : progress_(progress),
      interval_(std::clamp(heartbeat_interval / 10, std::chrono::milliseconds(20),
                           std::chrono::milliseconds(500))) {}

void PositionReporter::add_probe(PositionBoard::Probe probe) {
  probes_.push_back(std::move(probe));
}

RankPosition PositionReporter::read_position() {
  RankPosition position;
  const auto now = progress_.get();
  position.step = now.step;
  position.where = now.where;
  position.plane_call = plane_call_;
  auto caller = caller_;
  std::erase_if(probes_, [&](const PositionBoard::Probe& probe) {
    auto group = probe();
    if (group.is_closed) {
      closed_.push_front(std::move(group));
      return true;
    }
    add_caller(caller, group.caller);
    position.groups.push_back(std::move(group));
    return false;
  });
  // A program may split in each step. Only so many positions are sent.
  if (closed_.size() > kMaxPositionGroups) {
    closed_.resize(kMaxPositionGroups);
  }
  position.groups.insert(position.groups.end(), closed_.begin(), closed_.end());
  position.one_thread = caller.has_value();
  return position;
}

std::optional<RankPosition> PositionReporter::poll(SteadyTime steady) {
  if (steady < next_poll_) {
    return std::nullopt;
  }
  next_poll_ = steady + interval_;
  auto now = read_position();
  const bool is_unchanged = now.waits() && last_position_ == now;
  std::optional<RankPosition> message;
  if (is_unchanged && num_unchanged_++ % kPollsPerMessage == 0) {
    message = now;
  } else if (!is_unchanged && std::exchange(num_unchanged_, 0) > 0) {
    message.emplace();
  }
  last_position_ = std::move(now);
  return message;
}

}  // namespace ddp::detail
