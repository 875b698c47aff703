// SPDX-License-Identifier: Apache-2.0
// What a rank reports to rank 0 about itself: its progress, and its position while it waits.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/control/doctor/rank_report.hpp"
#include "core/control/rank_position.hpp"
#include "core/control/wire/tcp_socket.hpp"
#include "core/launch/training_state.hpp"

namespace ddp::detail {

/// A rank's place, which rank 0 shows if the rank dies silently.
struct Progress {
  int64_t step = -1;  ///< as in FailureCause
  std::string where;

  bool is_valid() const { return where.size() <= kMaxPlaceBytes; }
  friend auto message_fields(Progress& progress) { return std::tie(progress.step, progress.where); }
};

/// Tracks this rank's progress. No other mutex is locked under its own, so setting the progress
/// never waits for sockets. Any thread.
class ProgressTracker {
 public:
  /// `sender` is notified of progress to send, at most once per `interval`. It is null on rank 0,
  /// which reads its own progress directly.
  ProgressTracker(WakeEvent* sender, std::chrono::milliseconds interval)
      : sender_(sender), interval_(interval) {}

  void set(int64_t step, const std::string& where);
  /// Returns the previous activity.
  std::string set_activity(std::string activity);
  std::string activity() const;
  /// The activity, else a long wait for a batch, is appended to the place. A place that nobody set
  /// is the phase of the training loop.
  Progress get() const;

  /// Returns when unsent progress may be sent; nothing if all is sent.
  std::optional<SteadyTime> due() const;
  /// Returns unsent progress that is due at `now`. The sender calls this after each wake-up.
  std::optional<Progress> take_due(SteadyTime now);

 private:
  bool mark_unsent();
  Progress current() const;

  WakeEvent* const sender_;
  const std::chrono::milliseconds interval_;
  mutable std::mutex mutex_;
  Progress progress_;
  std::string activity_;
  const TrainingWatch training_;
  int64_t sent_step_ = -1;
  std::string sent_wait_;  // for a batch
  bool is_unsent_ = false;
  SteadyTime due_{};
};

/// The CPU time of this process between two ticks, in percent of one core. Where ranks share cores,
/// also the time in which the main thread waited for a core.
class CpuLoad {
 public:
  void tick(SteadyTime now);
  uint32_t percent() const { return percent_; }

 private:
  SteadyTime last_tick_{};
  double last_cpu_ = 0, last_delay_ = 0;  // seconds
  uint32_t percent_ = 0;
};

/// Decides when to send this rank's position. The owner's mutex guards it. That mutex also keeps
/// the control-plane call unchanged while probes run, so their positions belong to this call.
class PositionReporter {
 public:
  PositionReporter(const ProgressTracker& progress, std::chrono::milliseconds heartbeat_interval);

  void add_probe(PositionBoard::Probe probe);
  void remove_probes() {
    probes_.clear();
    closed_.clear();
  }

  /// This thread calls a control-plane collective.
  void add_plane_caller() { add_caller(caller_); }
  /// This rank waits in the collective of this sequence number.
  void begin_plane_call(uint64_t sequence) { plane_call_ = sequence + 1; }
  void end_plane_call() { plane_call_ = 0; }

  /// This rank's whole report, for rank 0. Its ages do not count the time in which this process was
  /// suspended: gaps between polls.
  RankReport report(SteadyTime steady = std::chrono::steady_clock::now());
  /// Reads the position 20 times per heartbeat interval. Returns the position to send: one when
  /// the rank waits, about one per heartbeat during the wait, and an empty one when the wait ends.
  std::optional<RankPosition> poll(SteadyTime steady);

 private:
  struct Suspension {
    SteadyTime end;
    std::chrono::milliseconds length;
  };

  void note_suspension(SteadyTime steady);
  /// `age` without the suspensions in it.
  int64_t running_age(int64_t age, SteadyTime steady) const;
  /// With `histories` also reads the recent collectives of each group.
  RankPosition read_position(std::vector<GroupHistory>* histories = nullptr);

  const ProgressTracker& progress_;
  const std::chrono::milliseconds interval_;
  std::vector<PositionBoard::Probe> probes_;
  std::deque<GroupPosition> closed_;         // of destroyed communicators, the newest first
  uint64_t plane_call_ = 0;                  // as in RankPosition
  CallerThread caller_ = std::thread::id();  // caller of the control plane's collectives
  std::optional<RankPosition> last_position_;
  CpuLoad cpu_load_;
  SteadyTime last_poll_{};
  std::deque<Suspension> suspensions_;  // the newest last
  int num_unchanged_ = 0;               // consecutive polls of an unchanged position
  SteadyTime next_poll_{};
};

}  // namespace ddp::detail
