// SPDX-License-Identifier: Apache-2.0
#include "core/control/rank_reports.hpp"

#include <time.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <utility>

#include "core/files/file_ops.hpp"
#include "core/launch/place_in_loop.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

// An unchanged position is sent once per this many polls.
constexpr int kPollsPerMessage = 20;

// A longer gap between polls is a suspension of this process, but for this time.
constexpr std::chrono::seconds kLongestTurn{1};
constexpr std::size_t kMaxSuspensions = 16;

// The seconds in which the main thread was ready and had no core; 0 where the kernel does not tell.
double main_thread_delay() {
  const auto text = kernel_text("/proc/self/schedstat");  // "cpu_ns delay_ns slices"
  uint64_t nanoseconds = 0;
  if (const auto blank = text.find(' '); blank != std::string::npos) {
    std::from_chars(text.data() + blank + 1, text.data() + text.size(), nanoseconds);
  }
  return 1e-9 * static_cast<double>(nanoseconds);
}

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
  auto place = activity_.empty() ? long_batch_wait() : activity_;
  if (place.empty() && progress.where.empty()) {
    place = last_phase();
  }
  if (!place.empty()) {
    progress.where += concat(progress.where.empty() ? "" : ", ", place);
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
  // A step that nobody announced wakes nobody, nor does a loader. So the sender looks at each of
  // its turns.
  auto progress = current();
  const auto wait = long_batch_wait();
  if (!std::exchange(is_unsent_, false) && progress.step == sent_step_ && wait == sent_wait_) {
    return std::nullopt;
  }
  due_ = now + interval_;
  sent_wait_ = wait;
  sent_step_ = progress.step;
  return progress;
}

void CpuLoad::tick(SteadyTime now) {
  const double passed = std::chrono::duration<double>(now - last_tick_).count();
  if (passed < 0.5) {
    return;
  }
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  const double cpu = static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  const double delay = main_thread_delay();
  if (last_tick_ != SteadyTime{}) {
    percent_ = static_cast<uint32_t>(100 * (cpu - last_cpu_ + delay - last_delay_) / passed);
  }
  last_tick_ = now;
  last_cpu_ = cpu;
  last_delay_ = delay;
}

PositionReporter::PositionReporter(const ProgressTracker& progress,
                                   std::chrono::milliseconds heartbeat_interval)
    : progress_(progress),
      interval_(std::clamp(heartbeat_interval / 20, std::chrono::milliseconds(20),
                           std::chrono::milliseconds(250))) {}

void PositionReporter::add_probe(PositionBoard::Probe probe) {
  probes_.push_back(std::move(probe));
}

RankPosition PositionReporter::read_position(std::vector<GroupHistory>* histories) {
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
    if (histories != nullptr) {
      histories->push_back(probe.history());
    }
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

void PositionReporter::note_suspension(SteadyTime steady) {
  const auto gap = steady - last_poll_;
  if (last_poll_ != SteadyTime{} && gap > kLongestTurn) {
    suspensions_.push_back(
        {steady, std::chrono::duration_cast<std::chrono::milliseconds>(gap - kLongestTurn)});
    if (suspensions_.size() > kMaxSuspensions) {
      suspensions_.pop_front();
    }
  }
  last_poll_ = steady;
}

int64_t PositionReporter::running_age(int64_t age, SteadyTime steady) const {
  auto running = age;
  for (const auto& [end, length] : suspensions_) {
    if (age_ms(end, steady) < age) {
      running -= length.count();
    }
  }
  return age == kUnknownAge ? age : std::max<int64_t>(0, running);
}

// A report must not fail: it is also made because something failed, maybe a probe.
RankReport PositionReporter::report(SteadyTime steady) {
  note_suspension(steady);
  RankReport report;
  try {
    report.position = read_position(&report.histories);
  } catch (const std::exception& error) {
    log_warning(concat("this rank's collectives are missing in the report: ", error.what()));
    report = {};
    report.position.step = progress_.get().step;
    report.position.where = progress_.get().where;
  }
  report.histories.resize(report.position.groups.size());  // of destroyed communicators: none
  report.cpu_percent = cpu_load_.percent();
  for (auto& history : report.histories) {
    for (auto& call : history.collectives) {
      for (auto* age : {&call.enqueued_ms, &call.started_ms, &call.ended_ms}) {
        *age = running_age(*age, steady);
      }
    }
    for (auto& graph : history.graphs) {
      graph.waited_ms = running_age(graph.waited_ms, steady);
    }
  }
  cut_to_limits(report);  // rank 0 keeps its own report as it is
  return report;
}

std::optional<RankPosition> PositionReporter::poll(SteadyTime steady) {
  note_suspension(steady);
  if (steady < next_poll_) {
    return std::nullopt;
  }
  next_poll_ = steady + interval_;
  cpu_load_.tick(steady);
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
