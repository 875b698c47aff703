// SPDX-License-Identifier: Apache-2.0
// The job's control plane: one small TCP star around rank 0, in every launch mode. It carries small
// agreements and the first cause of a failure; never gradients.
//
// All ranks must call functions marked "collective" in the same order, from one thread at a time.
// These calls block the host until every rank has called. If ranks deadlock, rank 0 ends the job
// with MismatchError (70), naming both sides (docs/architecture.md, "Failing").
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/core/membership.hpp"
#include "ddp/detail/failure_reports.hpp"

namespace ddp {

namespace detail {
class BackgroundService;
class GroupExchange;
class PositionBoard;
}  // namespace detail

/// Arguments set by the program. A value that contradicts the launcher is an error.
struct LaunchArguments {
  std::optional<int> rank = {};                ///< 0 … world_size - 1
  std::optional<int> world_size = {};          ///< ranks of the job
  std::optional<int> local_rank = {};          ///< on this node; chooses the GPU
  std::optional<int> local_world_size = {};    ///< ranks on this node
  std::optional<std::string> rendezvous = {};  ///< "host:port" of rank 0's control plane
};

struct ControlPlaneOptions {
  std::chrono::milliseconds rendezvous_timeout{300'000};  ///< for all ranks to connect at the start
  std::chrono::milliseconds heartbeat_interval{5'000};    ///< between heartbeats of a rank
  int heartbeat_misses = 3;  ///< a peer silent for interval * misses counts as lost
  std::chrono::milliseconds collective_timeout{600'000};  ///< of one call, then PeerLostError
  std::string bind_address;  ///< rank 0's; empty: one that peers can reach, loopback on one node
  /// Folder that all nodes share, for the file with the job's secret: srun without MPI (empty:
  /// $SLURM_SUBMIT_DIR, else $HOME), torchrun without DDP_SECRET (empty: /tmp on one host).
  std::string rendezvous_folder;
};

class ControlPlane : public detail::FailureReports {
 public:
  virtual const Membership& membership() const = 0;           ///< of the ranks it connects
  int rank() const { return membership().rank; }              ///< of this process
  int world_size() const { return membership().world_size; }  ///< number of ranks

  /// Returns root's value on every rank. Collective; at most 1 MiB.
  virtual std::string broadcast(const std::string& value, int root = 0) = 0;
  /// Every rank's value, indexed by rank. Collective; at most 1 MiB per rank. gather() is cheaper.
  virtual std::vector<std::string> all_gather(const std::string& value) = 0;
  /// Like all_gather() on `root`; other ranks return an empty list at once.
  virtual std::vector<std::string> gather(const std::string& value, int root = 0);
  /// Every rank's numbers, indexed by rank; ranks may give different counts. Collective.
  std::vector<std::vector<int64_t>> all_gather_numbers(const std::vector<int64_t>& numbers);
  virtual void barrier() = 0;  ///< collective
  bool agree_any(bool value);  ///< true on all ranks if true on any; collective: the host waits
  /// Returns rank 0's `value` if all ranks gave the same. Otherwise throws MismatchError with the
  /// first rank that differs and both values. Collective.
  std::string require_equal(const std::string& what, const std::string& value);

  /// Sets the place that the first-cause line shows if this rank dies silently. Never waits for the
  /// network. Any thread.
  virtual void set_progress(int64_t step, const std::string& where) = 0;
  /// Ordered end: peers that close afterwards are not failures. Collective. Destroying a plane that
  /// was not closed counts as a failure for the peers.
  virtual void close() = 0;

  // Internal: parts of a control plane of several ranks.
  virtual detail::GroupExchange* group_exchange() { return nullptr; }  ///< null with one rank
  virtual detail::PositionBoard* position_board() { return nullptr; }  ///< null with one rank
  /// Null with one rank.
  virtual detail::BackgroundService* background_service() { return nullptr; }
};

}  // namespace ddp
