// SPDX-License-Identifier: Apache-2.0
// What rank 0 and the others have in common: the background thread, collectives as the caller sees
// them, progress and failures.
//
// Threads: callers and the background thread share everything under one mutex; the background
// thread alone reads sockets. Writing is done by whoever queued something, as far as the socket
// takes it at once, and by the background thread after that. No lock is held while callbacks run.
#pragma once

#include <poll.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/control_channel.hpp"
#include "core/failure_box.hpp"
#include "core/group_exchange.hpp"
#include "core/note_board.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

enum class CollectiveKind : uint8_t { Broadcast, AllGather, Barrier, Close };
const char* to_string(CollectiveKind kind);

struct Contribution {
  uint64_t sequence = 0;
  CollectiveKind kind = CollectiveKind::Barrier;
  uint32_t root = 0;
  std::string value;
};

class ControlPlaneBase : public ControlPlane, public NoteBoard, public GroupExchange {
 public:
  ControlPlaneBase(const LaunchEnvironment& launch, const ControlPlaneOptions& options);

  int rank() const final { return rank_; }
  int world_size() const final { return world_size_; }
  std::string broadcast(const std::string& value, int root) final;
  std::vector<std::string> all_gather(const std::string& value) final;
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

 protected:
  // All of these are called with mutex_ held.
  virtual void contribute(Contribution contribution) = 0;
  virtual void send_progress() = 0;
  virtual void send_failure(const FailureCause& cause) = 0;
  virtual void send_note(const std::string& text) = 0;
  virtual void send_exchange(uint64_t key, uint32_t num_ranks, const std::string& value) = 0;
  virtual bool failure_was_delivered() const = 0;
  virtual void add_sockets(std::vector<pollfd>& watched) = 0;
  virtual void serve(SteadyTime now) = 0;
  /// Whether sockets may go away without it being a failure.
  virtual void wait_for_peers_to_leave(std::unique_lock<std::mutex>& lock) = 0;

  void start_thread();
  /// Called first by the destructors of derived classes: the thread calls their functions.
  void stop_thread();
  /// The end of a plane that was never closed is a failure for its peers.
  void leave_without_closing();
  void keep_note(int rank, std::string text);
  void keep_exchanged(uint64_t key, std::map<int, std::string> values);
  void note_result_part(uint64_t sequence, uint32_t part, uint32_t num_parts, std::string value);
  /// Waits (with mutex_ held) until `condition`, a failure, or `deadline`; throws the failure.
  template <typename Condition>
  bool wait_until(std::unique_lock<std::mutex>& lock, SteadyTime deadline, Condition condition) {
    changed_.wait_until(lock, deadline, [&] { return condition() || failure_.failed(); });
    if (!condition() && failure_.failed()) {
      throw_failure(failure_.get());
    }
    return condition();
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
  bool closing_ = false;              ///< all ranks have called close()
  bool first_cause_is_ours_ = false;  ///< this rank found it out: it says so in its log
  int64_t step_ = -1;
  std::string where_;

 private:
  struct PartialResult {
    std::vector<std::string> values;
    uint32_t num_arrived = 0;
  };

  std::vector<std::string> collective(CollectiveKind kind, uint32_t root, const std::string& value);
  void run_thread();
  void end_job_with(const std::string& problem);
  int poll_timeout_ms(SteadyTime now) const;
  void react_to_failure();

  uint64_t next_sequence_ = 0;
  std::map<uint64_t, PartialResult> results_;
  std::map<uint64_t, std::map<int, std::string>> exchanged_;  // by key, then rank
  std::vector<std::string> notes_;                            // by rank
  std::atomic<uint64_t> notes_version_{0};
  bool progress_is_new_ = false;
  SteadyTime progress_due_{};
  bool closed_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

std::string encode_contribution(const Contribution& contribution);
bool decode_contribution(std::string_view bytes, Contribution& contribution);

}  // namespace ddp::detail
