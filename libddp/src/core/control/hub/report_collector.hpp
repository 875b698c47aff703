// SPDX-License-Identifier: Apache-2.0
// The ranks' answers while rank 0 makes a report.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <utility>

#include "core/control/doctor/rank_report.hpp"
#include "core/control/wire/tcp_socket.hpp"

namespace ddp::detail {

/// The owner's mutex guards it. Times are of the steady clock: a report waits for no suspension.
class ReportCollector {
 public:
  /// Ranks that do not answer within this time are reported as such. Launchers that kill a failing
  /// job's ranks leave them a second.
  static constexpr std::chrono::milliseconds kAnswerLimit{750};
  /// Requests that come sooner after the last report are dropped.
  static constexpr std::chrono::milliseconds kPause{1000};

  bool is_open() const { return is_open_; }
  bool may_begin(SteadyTime now) const { return !is_open_ && now >= next_; }
  /// Forgets the answers of an open report.
  void begin(SteadyTime now) {
    is_open_ = true;
    deadline_ = now + kAnswerLimit;
    answers_.clear();
  }
  /// Ignores answers that come too late.
  void add(int rank, RankReport report) {
    if (is_open_) {
      answers_[rank] = std::move(report);
    }
  }
  /// `is_expected(rank)`: whether the rank can still answer.
  template <typename IsExpected>
  bool is_complete(int world_size, SteadyTime now, const IsExpected& is_expected) const {
    bool has_all = true;
    for (int rank = 0; rank < world_size; ++rank) {
      has_all = has_all && (answers_.contains(rank) || !is_expected(rank));
    }
    return is_open_ && (has_all || now >= deadline_);
  }
  /// Ends the report and returns the answers by rank.
  std::map<int, RankReport> take(SteadyTime now) {
    is_open_ = false;
    next_ = now + kPause;
    return std::exchange(answers_, {});
  }

 private:
  bool is_open_ = false;
  SteadyTime deadline_{}, next_{};
  std::map<int, RankReport> answers_;
};

}  // namespace ddp::detail
