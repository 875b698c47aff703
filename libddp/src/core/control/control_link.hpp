// SPDX-License-Identifier: Apache-2.0
// This rank's connections to the others, and the state that they share with the control plane's
// callers and its background thread.
//
// Threads: RankState::monitor's mutex guards everything but the progress and the failure, which
// have their own mutexes. So setting the progress never waits for sockets. Only the background
// thread reads sockets. The thread that queues a message writes as much as the socket takes at
// once; the background thread writes the rest. No lock is held while callbacks run.
#pragma once

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/control/doctor/job_report.hpp"
#include "core/control/failure/job_monitor.hpp"
#include "core/control/rank_position.hpp"
#include "core/control/rank_reports.hpp"
#include "core/control/wire/control_messages.hpp"
#include "core/control/wire/tcp_socket.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// Results of collectives and exchanges that rank 0 sent and no thread has taken yet. The owner's
/// mutex guards it.
class ReplyStore {
 public:
  /// Numbers this rank's next collective. Every rank counts its own.
  uint64_t next_sequence() { return next_sequence_++; }

  /// Returns whether the result is complete.
  bool add_result(ResultPart part) {
    auto& result = results_[part.sequence];
    result.values.resize(part.num_values);
    std::move(part.values.begin(), part.values.end(),
              result.values.begin() + static_cast<std::ptrdiff_t>(part.first));
    result.num_arrived += static_cast<uint32_t>(part.values.size());
    return result.num_arrived == part.num_values;
  }
  bool has_result(uint64_t sequence) const {
    const auto found = results_.find(sequence);
    return found != results_.end() && found->second.num_arrived == found->second.values.size();
  }
  std::vector<std::string> take_result(uint64_t sequence) {
    return std::move(results_.extract(sequence).mapped().values);
  }

  void add_exchanged(uint64_t key, std::map<int, std::string> values) {
    exchanged_[key] = std::move(values);
  }
  bool has_exchanged(uint64_t key) const { return exchanged_.contains(key); }
  std::map<int, std::string> take_exchanged(uint64_t key) {
    return std::move(exchanged_.extract(key).mapped());
  }

 private:
  struct PartialResult {
    std::vector<std::string> values;
    uint32_t num_arrived = 0;
  };

  uint64_t next_sequence_ = 0;
  std::map<uint64_t, PartialResult> results_;
  std::map<uint64_t, std::map<int, std::string>> exchanged_;  // by key, then rank
};

/// What the callers, the background thread and the link of one rank share.
struct RankState {
  RankState(Membership ranks, const ControlPlaneOptions& given)
      : membership(std::move(ranks)), options(given) {}

  /// A peer that is silent for longer counts as lost.
  std::chrono::milliseconds dead_after() const {
    return options.heartbeat_interval * options.heartbeat_misses;
  }
  /// Adds this rank, its host and its place if the cause has none, and a failing exit code.
  FailureCause complete(FailureCause cause) const {
    if (cause.rank < 0) {
      cause.rank = membership.rank;
    }
    if (cause.host.empty() && cause.rank == membership.rank) {
      cause.host = host;
    }
    const auto reached = progress.get();
    if (cause.step < 0) {
      cause.step = reached.step;
    }
    if (cause.where.empty()) {
      cause.where = reached.where;
    }
    return with_failing_code(std::move(cause));
  }

  /// What ended the job if a peer's connection is lost with `cause`. A process that was stopped for
  /// long finds all connections closed when it runs again, because the others have given it up.
  FailureCause cause_of_loss(const FailureCause& cause) const {
    const auto stopped = monitor.recent_stop();
    if (stopped < dead_after() / 2) {
      return cause;
    }
    FailureCause own;
    own.message =
        concat("this process was stopped for ", stopped.count() / 1000, " s, and rank ", cause.rank,
               " closed its connection meanwhile: ranks give up one that is silent for ",
               dead_after().count(), " ms");
    own.exit_code = cause.exit_code;
    return complete(std::move(own));
  }

  Membership membership;  ///< the link sets the hosts before wait_for_all() returns
  const ControlPlaneOptions options;
  const std::string host = host_name();
  WakeEvent wake;  ///< wakes the background thread
  std::atomic<uint64_t> num_frames_sent{0};
  // Rank 0 receives at most 1000 progress messages per second in total.
  ProgressTracker progress{membership.rank == 0 ? nullptr : &wake,
                           std::chrono::milliseconds(std::max(10, membership.world_size))};
  JobMonitor monitor{membership.generation, options.heartbeat_interval / 2};
  ReplyStore replies;                                               ///< guarded by monitor
  PositionReporter position{progress, options.heartbeat_interval};  ///< guarded by monitor
};

/// A hub on rank 0, a leaf on other ranks. All functions are called with the monitor's mutex held.
class ControlLink {
 public:
  virtual ~ControlLink() = default;

  /// Returns when every rank has joined. Throws the failure of the rendezvous.
  virtual void wait_for_all(JobMonitor::Lock& lock) = 0;
  virtual void contribute(Contribution contribution) = 0;
  virtual void send_progress(const Progress& progress) = 0;
  virtual void send_position(const RankPosition& position) = 0;
  virtual void send_failure(const FailureCause& cause) = 0;
  virtual void send_exchange(uint64_t key, uint32_t num_ranks, const std::string& value) = 0;
  /// Makes rank 0 report on all ranks. Does nothing after a failure, and shortly after another
  /// report.
  virtual void request_report() = 0;
  /// Returns a report that rank 0 has just completed; always nothing on other ranks.
  virtual std::optional<JobReport> take_report() { return std::nullopt; }
  virtual bool failure_was_delivered() const = 0;
  virtual void add_sockets(std::vector<pollfd>& watched) = 0;
  /// `now` is from the running clock. `watched` is poll()'s result, in the order of add_sockets().
  virtual void serve(const std::vector<pollfd>& watched, SteadyTime now) = 0;
  /// Returns when closing this rank's sockets cannot count as a failure.
  virtual void wait_for_peers_to_leave(JobMonitor::Lock& lock) = 0;
};

}  // namespace ddp::detail
