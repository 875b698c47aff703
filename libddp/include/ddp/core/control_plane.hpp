// SPDX-License-Identifier: Apache-2.0
// The job's control plane: one small TCP star around rank 0, in every launch mode. It carries the
// NCCL id, small agreements and the first cause of a failure; never gradients.
//
// All ranks must call functions marked "collective" in the same order, from one thread at a time.
// These calls block the host until every rank has called. A background thread sends heartbeats and
// receives failures, also while a collective waits.
//
// Rank 0 ends the job with MismatchError (70), naming both sides, if ranks wait for each other for
// ever. That is: a rank left while another waits for it in a collective, or two ranks wait in
// different ones. A rank that still computes, loads or saves is never blamed, however long it
// takes.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/core/launch_environment.hpp"

namespace ddp {

/// How ranks learn rank 0's address and the job's secret. Implementations: MPI broadcast, a 0600
/// file in a shared folder, torchrun's store, a fixed address.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  /// This host's address that peers can reach (rank 0 binds only this one).
  virtual std::string bind_address() = 0;
  /// A fixed port, or 0 to let the system choose.
  virtual int bind_port() { return 0; }
  /// The job's secret if all ranks know it already (DDP_SECRET). Empty: rank 0 makes a random one
  /// and sends it in the contact, over a channel that strangers cannot read.
  virtual std::string secret() { return {}; }
  /// Rank 0: publishes `contact` to all ranks. Others: returns rank 0's contact, or an empty string
  /// if it is not known yet. Called again with the remaining time while that contact cannot be
  /// reached. Throws PeerLostError after `timeout`.
  virtual std::string exchange(int rank, const std::string& contact,
                               std::chrono::milliseconds timeout) = 0;
};

struct ControlPlaneOptions {
  std::chrono::milliseconds rendezvous_timeout{300'000};
  std::chrono::milliseconds heartbeat_interval{5'000};
  int heartbeat_misses = 3;  ///< a peer silent for interval * misses counts as lost
  std::chrono::milliseconds collective_timeout{600'000};
  std::string bind_address;  ///< rank 0's; empty: one that peers can reach, loopback on one node
  std::string
      rendezvous_folder;  ///< shared by all nodes, for Slurm without MPI; empty: see rendezvous.hpp
};

/// The cause of the job's failure, as reported by the first rank that knew.
struct FailureCause {
  int rank = -1;
  std::string host;
  int64_t step = -1;    ///< -1 before the first step
  std::string where;    ///< bucket or module, if known
  std::string message;  ///< the original message
  ExitCode exit_code = ExitCode::PeerLost;
  /// "rank 2 (node3) failed at step 41 in bucket 3: out of memory".
  std::string to_line() const;
};

class ControlPlane {
 public:
  /// Joins the job. Collective. Opens no socket at world size 1. On a rendezvous timeout throws
  /// PeerLostError naming every missing rank. Throws SettingsError if two processes claim one rank.
  static std::unique_ptr<ControlPlane> create(const LaunchEnvironment& launch,
                                              std::shared_ptr<Rendezvous> rendezvous,
                                              const ControlPlaneOptions& options = {});
  virtual ~ControlPlane() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  /// Returns root's value on every rank. Collective; at most 1 MiB.
  virtual std::string broadcast(const std::string& value, int root = 0) = 0;
  /// Every rank's value, indexed by rank. Collective; at most 1 MiB per rank. Rank 0 sends all
  /// values to all ranks; gather() is cheaper if only the root reads them.
  virtual std::vector<std::string> all_gather(const std::string& value) = 0;
  /// Like all_gather() on `root`. Other ranks return an empty list at once. Collective; at most 1
  /// MiB per rank.
  virtual std::vector<std::string> gather(const std::string& value, int root = 0) {
    auto values = all_gather(value);
    return rank() == root ? values : std::vector<std::string>();
  }
  /// Every rank's numbers, indexed by rank; ranks may give different counts. Collective.
  std::vector<std::vector<int64_t>> all_gather_numbers(const std::vector<int64_t>& numbers);
  /// Collective.
  virtual void barrier() = 0;
  /// True on all ranks if it was true on any. Collective.
  bool agree_any(bool value);
  /// Returns rank 0's `value` if all ranks gave the same. Otherwise throws MismatchError with the
  /// first rank that differs and both values. Collective.
  std::string require_equal(const std::string& what, const std::string& value);

  /// Sets the place that the first-cause line shows if this rank dies silently. Copies `where`
  /// under a lock that is never held in socket calls. Rank 0 learns it within 10 ms, in large jobs
  /// within 1 ms per rank. Any thread.
  virtual void set_progress(int64_t step, const std::string& where) = 0;
  /// Reports the cause of the job's failure to all ranks. Only the first cause counts. Any thread.
  virtual void publish_failure(const FailureCause& cause) = 0;
  /// The first cause, once known. Any thread.
  virtual bool failed() const = 0;
  virtual FailureCause failure() const = 0;
  /// Calls `callback` once, on the background thread, when a failure becomes known. Communicators
  /// abort here so that no thread stays in a collective. Returns a token for
  /// remove_failure_callback.
  virtual int add_failure_callback(std::function<void(const FailureCause&)> callback) = 0;
  virtual void remove_failure_callback(int token) = 0;
  /// Ordered end: peers that close afterwards are not failures. Collective. Destroying a plane that
  /// was not closed counts as a failure for the peers.
  virtual void close() = 0;
};

}  // namespace ddp
