// SPDX-License-Identifier: Apache-2.0
// Shared by rank 0 and the other ranks: the background thread, the caller's side of collectives,
// progress and failures.
//
// Threads: one mutex guards everything but the progress, which has its own mutex. So setting the
// progress never waits for sockets. Only the background thread reads sockets. The thread that
// queues a message writes as much as the socket takes at once; the background thread writes the
// rest. No lock is held while callbacks run.
#pragma once

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/control_channel.hpp"
#include "core/control_messages.hpp"
#include "core/failure_box.hpp"
#include "core/group_exchange.hpp"
#include "core/note_board.hpp"
#include "core/rank_position.hpp"
#include "core/running_clock.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

struct Progress {
  int64_t step = -1;
  std::string where;
};

class ControlPlaneBase : public ControlPlane,
                         public NoteBoard,
                         public GroupExchange,
                         public PositionBoard {
 public:
  ControlPlaneBase(const LaunchEnvironment& launch, const ControlPlaneOptions& options);

  int rank() const final { return rank_; }
  int world_size() const final { return world_size_; }
  std::string broadcast(const std::string& value, int root) final;
  std::vector<std::string> all_gather(const std::string& value) final;
  std::vector<std::string> gather(const std::string& value, int root) final;
  void barrier() final;
  void set_progress(int64_t step, const std::string& where) final;
  void publish_failure(const FailureCause& cause) final;
  bool failed() const final { return failure_.failed(); }
  FailureCause failure() const final { return failure_.get(); }
  int add_failure_callback(std::function<void(const FailureCause&)> callback) final;
  void remove_failure_callback(int token) final;
  void close() final;
  void post_note(const std::string& text) final;
  std::vector<std::string> notes() const final;
  uint64_t notes_version() const final { return notes_version_.load(std::memory_order_acquire); }
  std::map<int, std::string> exchange(uint64_t key, int num_ranks, const std::string& value,
                                      const std::function<void()>& look) final;
  void add_probe(Probe probe) final;
  std::string set_activity(std::string activity) final;
  void outlive_context() final;
  /// Frames written to sockets so far.
  uint64_t num_frames_sent() const { return num_frames_.load(std::memory_order_relaxed); }

 protected:
  // All of these are called with mutex_ held.
  virtual void contribute(Contribution contribution) = 0;
  virtual void send_progress(const Progress& progress) = 0;
  virtual void send_position(const RankPosition& position) = 0;
  virtual void send_failure(const FailureCause& cause) = 0;
  virtual void send_note(const std::string& text) = 0;
  virtual void send_exchange(uint64_t key, uint32_t num_ranks, const std::string& value) = 0;
  virtual bool failure_was_delivered() const = 0;
  virtual void add_sockets(std::vector<pollfd>& watched) = 0;
  /// `now` is from the running clock. `watched` is poll()'s result, in the order of add_sockets().
  virtual void serve(const std::vector<pollfd>& watched, SteadyTime now) = 0;
  /// Whether a socket may close without counting as a failure.
  virtual void wait_for_peers_to_leave(std::unique_lock<std::mutex>& lock) = 0;

  void start_thread();
  /// Destructors of derived classes call this first, because the thread calls their functions.
  void stop_thread();
  /// Destroying a plane that was never closed is a failure for its peers.
  void leave_without_closing();
  void keep_note(int rank, std::string text);
  void keep_exchanged(uint64_t key, std::map<int, std::string> values);
  void note_result(ResultPart part);
  Progress progress() const;
  /// Waits (with mutex_ held) for `condition`, a failure, or `deadline` of the running clock.
  /// Throws the failure.
  template <typename Condition>
  bool wait_until(std::unique_lock<std::mutex>& lock, SteadyTime deadline, Condition condition) {
    while (!condition() && !failure_.failed() && clock_.now() < deadline) {
      changed_.wait_for(
          lock, std::min<RunningClock::Duration>(deadline - clock_.now(), std::chrono::seconds(1)));
    }
    const bool holds = condition();
    if (!holds && failure_.failed()) {
      throw_failure(failure_.get());
    }
    return holds;
  }
  std::chrono::milliseconds dead_after() const {
    return options_.heartbeat_interval * options_.heartbeat_misses;
  }

  const int rank_, world_size_;
  const ControlPlaneOptions options_;
  const std::string host_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  WakeEvent wake_;
  FailureBox failure_;
  RunningClock clock_;                ///< for every limit except the heartbeat interval
  bool closing_ = false;              ///< all ranks have called close()
  bool first_cause_is_ours_ = false;  ///< this rank detected the failure and logs it as its own
  std::atomic<uint64_t> num_frames_{0};

 private:
  struct PartialResult {
    std::vector<std::string> values;
    uint32_t num_arrived = 0;
  };

  std::vector<std::string> collective(CollectiveKind kind, uint32_t root, const std::string& value);
  void tell_progress();
  std::string activity() const;
  RankPosition position();
  void look_at_position(SteadyTime steady);
  void run_thread();
  void end_job_with(const std::string& problem);
  int poll_timeout_ms(SteadyTime now) const;
  void log_first_cause() const;

  uint64_t next_sequence_ = 0;
  std::map<uint64_t, PartialResult> results_;
  std::map<uint64_t, std::map<int, std::string>> exchanged_;  // by key, then rank
  std::vector<std::string> notes_;                            // by rank
  std::atomic<uint64_t> notes_version_{0};
  SteadyTime progress_due_{};
  mutable std::mutex progress_mutex_;  // of progress_, activity_; no other is locked below it
  Progress progress_;
  std::string activity_;
  std::atomic<bool> progress_is_new_{false};
  std::vector<Probe> probes_;
  uint64_t plane_call_ = 0;                  // as in RankPosition
  CallerThread caller_ = std::thread::id();  // caller of the collectives
  std::optional<RankPosition> last_position_;
  int num_looks_stood_ = 0;  // number of looks at an unchanged position
  SteadyTime next_look_{};
  bool closed_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ddp::detail
