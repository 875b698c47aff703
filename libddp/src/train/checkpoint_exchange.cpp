// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint_exchange.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "core/rank_position.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

// Maximum number of steps between exchanges, whatever their duration.
constexpr double kMaxStepsBetween = 10'000;
// The messages of all ranks' writers fit into one message of the control plane.
constexpr std::size_t kMaxErrorBytes = 4096;

}  // namespace

CheckpointerImpl::Digest CheckpointerImpl::Digest::of(const std::vector<Status>& statuses) {
  double slowest = 0;
  for (const auto& status : statuses) {
    slowest = std::max(slowest, status.step_seconds);
  }
  // A decision looks for the first rank with some status. That rank is kept.
  Digest digest{.world_size = statuses.size(), .first_with = {}};
  std::set<std::string> seen;
  for (std::size_t rank = 0; rank < statuses.size(); ++rank) {
    auto status = statuses[rank];
    status.step_seconds = slowest;
    status.pause_seconds = statuses[0].pause_seconds;
    status.records.clear();
    if (seen.insert(encode_message(status)).second) {
      digest.first_with.emplace_back(rank, std::move(status));
    }
  }
  return digest;
}

std::vector<CheckpointerImpl::Status> CheckpointerImpl::Digest::statuses() const {
  std::vector<Status> statuses(world_size);
  for (const auto& [rank, status] : first_with) {
    statuses.at(rank) = status;
  }
  return statuses;
}

CheckpointerImpl::Status CheckpointerImpl::own_status() {
  const auto pause = pace_.pause(std::chrono::duration<double>(options_.stop_check_seconds));
  Status status{.stop = stop_check_ && stop_check_(),
                .step_seconds = step_seconds_,
                .pause_seconds = pause.count()};
  const std::chrono::duration<double, std::ratio<60>> minutes = Clock::now() - last_save_time_;
  status.due_by_time =
      enabled() && options_.every_minutes > 0 && minutes.count() >= options_.every_minutes;
  if (writer_.running()) {
    status.writer = Status::Writer::Running;
  } else {
    status.error = writer_.error().substr(0, kMaxErrorBytes);
    status.writer = status.error.empty() ? Status::Writer::Resting : Status::Writer::Failed;
    if (pending_ && pending_->phase == Phase::Writing && status.error.empty()) {
      status.records = records_;
      status.not_finite = not_finite_;
    }
  }
  return status;
}

std::vector<CheckpointerImpl::Status> CheckpointerImpl::exchange() {
  auto statuses = gather_messages(control_plane_, own_status());
  const auto digest =
      broadcast_message(control_plane_, is_main() ? Digest::of(statuses) : Digest{});
  if (!is_main()) {
    statuses = digest.statuses();
  }
  if (pending_) {
    advance(statuses);
  }
  return statuses;
}

// Advances the pending save; the result depends only on the gathered statuses.
void CheckpointerImpl::advance(const std::vector<Status>& statuses) {
  const auto running = [](const Status& s) { return s.writer == Status::Writer::Running; };
  if (pending_->phase == Phase::Committing) {
    if (running(statuses[0])) {
      return;
    }
    if (statuses[0].writer == Status::Writer::Failed) {
      note_failure(pending_->step, 0, statuses[0].error);
    } else {
      note_saved();
    }
    return;
  }
  // The folder must stay until the last rank has finished writing: a failure elsewhere waits too.
  if (std::any_of(statuses.begin(), statuses.end(), running)) {
    return;
  }
  for (std::size_t rank = 0; rank < statuses.size(); ++rank) {
    if (statuses[rank].writer == Status::Writer::Failed) {
      if (is_main()) {
        remove_folder(ops_, options_.dir + "/" + pending_->folder);
      }
      note_failure(pending_->step, static_cast<int>(rank), statuses[rank].error);
      return;
    }
  }
  for (const auto& status : statuses) {
    pending_->not_finite = pending_->not_finite.empty() ? status.not_finite : pending_->not_finite;
  }
  pending_->phase = Phase::Committing;
  if (is_main()) {
    start_commit(statuses);
  }
}

void CheckpointerImpl::finish_pending() {
  while (pending_) {
    writer_.wait();
    exchange();
  }
}

int64_t CheckpointerImpl::steps_until_exchange(const std::vector<Status>& statuses) const {
  double slowest = 0;
  for (const auto& status : statuses) {
    slowest = std::max(slowest, status.step_seconds);
  }
  if (slowest <= 0) {
    return 1;  // nothing measured yet
  }
  return static_cast<int64_t>(
      std::clamp(std::floor(statuses[0].pause_seconds / slowest), 1.0, kMaxStepsBetween));
}

// A rank that exits during another rank's before_stop_ would abort that rank.
void CheckpointerImpl::tell_stop(int64_t done) {
  if (before_stop_) {
    before_stop_(done);
    control_plane_.barrier();
  }
}

void CheckpointerImpl::stop(int64_t step, const std::vector<Status>& statuses) {
  const auto asked = std::find_if(statuses.begin(), statuses.end(),
                                  [](const Status& status) { return status.stop; });
  const auto who = concat("rank ", asked - statuses.begin(), " was asked to stop");
  if (!enabled()) {
    tell_stop(step + 1);
    // Not Stop: its exit code requests a restart, which would begin at step 0 forever.
    throw Error(ExitCode::UserException,
                concat(who, ": stopped after ", step + 1,
                       " steps, no checkpoint was saved because checkpoint.dir is empty; fix: set "
                       "checkpoint.dir to a folder that all ranks see"));
  }
  finish_pending();  // if it fails, the next line tries again
  save(step, std::nullopt);
  finish_pending();
  tell_stop(step + 1);
  if (last_saved_step_ != step + 1) {
    const auto failure = std::exchange(unsaved_, std::nullopt);
    throw SaveFailure(failure ? failure->rank : 0,
                      concat(who, ": stopped after ", step + 1, " steps, but its state is lost: ",
                             failure ? failure->what() : "it could not be saved"));
  }
  throw Stop(concat(who, ": stopped after ", step + 1, " steps, saved in ", options_.dir));
}

void CheckpointerImpl::save_if_due(int64_t step) {
  note_call(step);
  const int64_t done = step + 1;
  bool due = enabled() && options_.every_steps > 0 && done % options_.every_steps == 0;
  if (done >= next_exchange_) {
    const auto now = Clock::now();
    if (done > exchange_step_ && next_exchange_ > 0) {
      step_seconds_ = std::chrono::duration<double>(now - exchange_time_).count() /
                      static_cast<double>(done - exchange_step_);
    }
    const ActivityScope activity(control_plane_, "checkpoint check");
    const auto statuses = exchange();
    exchange_step_ = done;
    exchange_time_ = Clock::now();
    pace_.note(exchange_time_ - now);
    next_exchange_ = done + steps_until_exchange(statuses);
    due = due || statuses[0].due_by_time;
    if (std::any_of(statuses.begin(), statuses.end(), [](const Status& s) { return s.stop; })) {
      stop(step, statuses);
    }
  }
  if (due) {
    save(step, std::nullopt);
  }
}

}  // namespace ddp::detail
