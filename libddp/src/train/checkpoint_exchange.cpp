// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint_exchange.hpp"

#include <algorithm>
#include <cmath>
#include <set>

namespace ddp::detail {
namespace {

// Maximum number of steps between exchanges, whatever their duration.
constexpr double kMaxStepsBetween = 10'000;

int64_t steps_until_exchange(double slowest_step, double pause) {
  if (slowest_step <= 0) {
    return 1;  // nothing measured yet
  }
  return static_cast<int64_t>(std::clamp(std::floor(pause / slowest_step), 1.0, kMaxStepsBetween));
}

}  // namespace

CheckpointSchedule::CheckpointSchedule(const CheckpointOptions& options, Clock::time_point now)
    : every_steps_(options.dir.empty() ? 0 : options.every_steps),
      every_minutes_(options.dir.empty() ? 0 : options.every_minutes),
      interval_(options.stop_check_seconds),
      last_save_(now),
      begun_(now),
      ended_(now) {}

bool CheckpointSchedule::is_due_by_time(Clock::time_point now) const {
  const std::chrono::duration<double, std::ratio<60>> minutes = now - last_save_;
  return every_minutes_ > 0 && minutes.count() >= every_minutes_;
}

void CheckpointSchedule::begin_exchange(int64_t done, Clock::time_point now) {
  if (done > exchange_step_ && next_exchange_ > 0) {
    step_seconds_ = std::chrono::duration<double>(now - ended_).count() /
                    static_cast<double>(done - exchange_step_);
  }
  begun_ = now;
}

void CheckpointSchedule::end_exchange(int64_t done, Clock::time_point now, double slowest_step,
                                      double pause) {
  exchange_step_ = done;
  ended_ = now;
  pace_.note(ended_ - begun_);
  next_exchange_ = done + steps_until_exchange(slowest_step, pause);
}

StatusDigest StatusDigest::of(const std::vector<RankStatus>& statuses) {
  const double slowest = slowest_step(statuses);
  // A decision looks for the first rank with some status. That rank is kept.
  StatusDigest digest{.world_size = statuses.size(), .first_with = {}};
  std::set<std::string> seen;
  for (std::size_t rank = 0; rank < statuses.size(); ++rank) {
    auto status = statuses[rank];
    status.step_seconds = slowest;
    status.pause_seconds = statuses[0].pause_seconds;
    status.writer.records.clear();
    if (seen.insert(encode_message(status)).second) {
      digest.first_with.emplace_back(rank, std::move(status));
    }
  }
  return digest;
}

std::vector<RankStatus> StatusDigest::statuses() const {
  std::vector<RankStatus> statuses(world_size);
  for (const auto& [rank, status] : first_with) {
    statuses.at(rank) = status;
  }
  return statuses;
}

std::vector<RankStatus> exchange_statuses(ControlPlane& control_plane, const RankStatus& own) {
  auto statuses = gather_messages(control_plane, own);
  const bool is_main = control_plane.rank() == 0;
  const auto digest =
      broadcast_message(control_plane, is_main ? StatusDigest::of(statuses) : StatusDigest{});
  return is_main ? statuses : digest.statuses();
}

double slowest_step(const std::vector<RankStatus>& statuses) {
  double slowest = 0;
  for (const auto& status : statuses) {
    slowest = std::max(slowest, status.step_seconds);
  }
  return slowest;
}

}  // namespace ddp::detail
