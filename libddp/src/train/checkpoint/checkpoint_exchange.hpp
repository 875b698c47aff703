// SPDX-License-Identifier: Apache-2.0
// When the ranks of a Checkpointer exchange their statuses, and what they send. Torch-free.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/control/exchange_pace.hpp"
#include "core/control/failure/first_failure.hpp"
#include "core/control/wire/message_codec.hpp"
#include "core/files/file_ops.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/train/options.hpp"

namespace ddp::detail {

/// Decides when saves are due, and after which steps the ranks exchange their statuses. `done` is a
/// number of steps done. Callers pass the time, so that tests need no sleeps.
class CheckpointSchedule {
 public:
  using Clock = std::chrono::steady_clock;
  /// Without a folder no save is due, but the ranks exchange stop requests.
  CheckpointSchedule(const CheckpointOptions& options, Clock::time_point now)
      : every_steps_(options.dir.empty() ? 0 : options.every_steps),
        every_minutes_(options.dir.empty() ? 0 : options.every_minutes),
        interval_(options.stop_check_seconds),
        last_save_(now),
        begun_(now),
        ended_(now) {}

  bool is_due_by_steps(int64_t done) const { return every_steps_ > 0 && done % every_steps_ == 0; }
  bool is_due_by_time(Clock::time_point now) const {
    const std::chrono::duration<double, std::ratio<60>> minutes = now - last_save_;
    return every_minutes_ > 0 && minutes.count() >= every_minutes_;
  }
  /// A save starts. A failed save counts too: the next one is due as usual.
  void record_save(Clock::time_point now) { last_save_ = now; }

  bool is_exchange_due(int64_t done) const { return done >= next_exchange_; }
  /// Measures the duration of the steps since the last exchange.
  void begin_exchange(int64_t done, Clock::time_point now) {
    if (done > exchange_step_ && next_exchange_ > 0) {
      step_seconds_ = std::chrono::duration<double>(now - ended_).count() /
                      static_cast<double>(done - exchange_step_);
    }
    begun_ = now;
  }
  /// Chooses the next exchange from values that all ranks know: the slowest rank's step and rank
  /// 0's pause, in seconds.
  void end_exchange(int64_t done, Clock::time_point now, double slowest_step, double pause) {
    exchange_step_ = done;
    ended_ = now;
    pace_.note(ended_ - begun_);
    const double steps = slowest_step > 0 ? std::floor(pause / slowest_step) : 1;  // 1: unmeasured
    next_exchange_ = done + static_cast<int64_t>(std::clamp(steps, 1.0, kMaxSteps));
  }

  /// This rank's mean since the last exchange; 0: nothing measured yet.
  double step_seconds() const { return step_seconds_; }
  /// From the end of this exchange to the start of the next; rank 0's counts.
  double pause_seconds() const { return pace_.pause(interval_).count(); }

 private:
  static constexpr double kMaxSteps = 10'000;  ///< between exchanges, whatever their duration

  const int64_t every_steps_;   ///< 0: not by steps
  const double every_minutes_;  ///< 0: not by time
  const std::chrono::duration<double> interval_;
  Clock::time_point last_save_;

  int64_t next_exchange_ = 0;  ///< number of steps done at the next exchange
  int64_t exchange_step_ = 0;  ///< number of steps done at the last exchange
  Clock::time_point begun_;    ///< begin of the last exchange
  Clock::time_point ended_;    ///< end of the last exchange
  double step_seconds_ = 0;
  ExchangePace pace_;
};

/// One rank's writing thread.
struct WriterStatus {
  enum class State { Resting, Running, Failed };
  State state = State::Resting;
  std::string error = {};                ///< why the writer failed
  std::vector<FileRecord> records = {};  ///< files written
  std::string not_finite = {};           ///< why the saved state is not finite

  friend auto message_fields(WriterStatus& s) {
    return std::tie(s.state, s.error, s.records, s.not_finite);
  }
};

/// One rank's message in an exchange.
struct RankStatus {
  bool stop = false;
  bool due_by_time = false;  ///< rank 0's clock
  double step_seconds = 0;
  double pause_seconds = 0;  ///< until the next exchange; rank 0's counts
  WriterStatus writer = {};

  friend auto message_fields(RankStatus& s) {
    return std::tie(s.stop, s.due_by_time, s.step_seconds, s.pause_seconds, s.writer);
  }
};

/// The part of all ranks' statuses that decisions need: each different status once, from the first
/// rank that has it, with the slowest step and rank 0's pause. It has no records, because only rank
/// 0 uses them.
struct StatusDigest {
  std::size_t world_size = 0;
  std::vector<std::pair<std::size_t, RankStatus>> first_with;  ///< rank, status

  static StatusDigest of(const std::vector<RankStatus>& statuses);
  /// Statuses that lead to the same decisions as the original ones.
  std::vector<RankStatus> statuses() const;
  friend auto message_fields(StatusDigest& digest) {
    return std::tie(digest.world_size, digest.first_with);
  }
};

/// Gathers all statuses on rank 0 and broadcasts their digest. Returns the statuses on rank 0, and
/// the digest's statuses on other ranks. Collective.
std::vector<RankStatus> exchange_statuses(ControlPlane& control_plane, const RankStatus& own);

double slowest_step(const std::vector<RankStatus>& statuses);

/// "rank 1 was asked to stop", of the first rank whose request sets `stops`; empty if none does.
/// `requests` has one request per rank.
template <typename Request>
std::string stop_reason(const std::vector<Request>& requests, bool Request::*stops) {
  const auto asked = std::find_if(requests.begin(), requests.end(),
                                  [=](const Request& request) { return request.*stops; });
  return asked == requests.end() ? ""
                                 : concat("rank ", asked - requests.begin(), " was asked to stop");
}

/// Returns rank 0's value on every rank. If `make` throws an Error on rank 0, every rank throws an
/// error with the same exit code. Collective.
template <typename F>
auto broadcast_from_main(ControlPlane& control_plane, F&& make) {
  using Value = decltype(make());
  std::tuple answer{Value(), ExitCode::Ok, std::string()};
  if (control_plane.rank() == 0) {
    try {
      std::get<0>(answer) = make();
    } catch (const Error& error) {
      std::get<1>(answer) = error.exit_code();
      std::get<2>(answer) = error.what();
    }
  }
  const auto [value, exit_code, message] = broadcast_message(control_plane, answer);
  if (exit_code != ExitCode::Ok) {
    FailureCause cause;
    cause.message = message;
    cause.exit_code = exit_code;
    throw_failure(cause);
  }
  return value;
}

}  // namespace ddp::detail
