// SPDX-License-Identifier: Apache-2.0
// This rank's connections to the others, and the state that they share with the control plane's
// callers and its background thread.
//
// Threads: RankState::monitor's mutex guards everything but the progress, the announcements and the
// failure, which have their own mutexes. So setting the progress never waits for sockets. Only the
// background thread reads sockets. The thread that queues a message writes as much as the socket
// takes at once; the background thread writes the rest. No lock is held while callbacks run.
#pragma once

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <vector>

#include "core/announcement_board.hpp"
#include "core/control_messages.hpp"
#include "core/job_monitor.hpp"
#include "core/pending_replies.hpp"
#include "core/position_watch.hpp"
#include "core/progress_tracker.hpp"
#include "core/rank_position.hpp"
#include "core/tcp_socket.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/core/launch_environment.hpp"

namespace ddp::detail {

struct RankState {
  RankState(const LaunchEnvironment& launch, const ControlPlaneOptions& given)
      : rank(launch.rank), world_size(launch.world_size), options(given) {}

  /// A peer that is silent for longer counts as lost.
  std::chrono::milliseconds dead_after() const {
    return options.heartbeat_interval * options.heartbeat_misses;
  }
  /// Adds this rank, its host and its place if the cause has none.
  FailureCause complete(FailureCause cause) const {
    if (cause.rank < 0) {
      cause.rank = rank;
    }
    if (cause.host.empty() && cause.rank == rank) {
      cause.host = host;
    }
    const auto reached = progress.get();
    if (cause.step < 0) {
      cause.step = reached.step;
    }
    if (cause.where.empty()) {
      cause.where = reached.where;
    }
    return cause;
  }

  const int rank, world_size;
  const ControlPlaneOptions options;
  const std::string host = host_name();
  WakeEvent wake;  ///< wakes the background thread
  std::atomic<uint64_t> num_frames_sent{0};
  // Rank 0 gets at most 1000 progress messages per second in total.
  ProgressTracker progress{rank == 0 ? nullptr : &wake,
                           std::chrono::milliseconds(std::max(10, world_size))};
  AnnouncementStore announcements{world_size};
  JobMonitor monitor{options.heartbeat_interval / 2};
  PendingReplies replies;                                        ///< guarded by monitor
  PositionWatch position{progress, options.heartbeat_interval};  ///< guarded by monitor
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
  virtual void send_announcement(const std::string& text) = 0;
  virtual void send_exchange(uint64_t key, uint32_t num_ranks, const std::string& value) = 0;
  virtual bool failure_was_delivered() const = 0;
  virtual void add_sockets(std::vector<pollfd>& watched) = 0;
  /// `now` is from the running clock. `watched` is poll()'s result, in the order of add_sockets().
  virtual void serve(const std::vector<pollfd>& watched, SteadyTime now) = 0;
  /// Returns when closing this rank's sockets cannot count as a failure.
  virtual void wait_for_peers_to_leave(JobMonitor::Lock& lock) = 0;
};

}  // namespace ddp::detail
