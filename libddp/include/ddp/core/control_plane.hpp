// SPDX-License-Identifier: Apache-2.0
// The job's control plane: one small TCP star with rank 0 in the middle, in every launch mode. It
// carries the NCCL id, small agreements and the first cause of a failure; never gradients.
//
// All calls named "collective" must be made by all ranks in the same order, from one thread at a
// time; they block the host until every rank has called. A background thread keeps the heartbeat
// and hears of failures, also while a collective waits.
//
// Rank 0 ends the job with MismatchError (70), both sides named, where ranks wait for each other
// for ever: a rank left while another waits for it in a collective, or two ranks stand in different
// ones. A rank that still computes, loads or saves is never judged, however long it takes.
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
/// file in a shared folder, torchrun's store, an address known beforehand.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  /// The address of this host that peers can reach (rank 0 binds only this one).
  virtual std::string bind_address() = 0;
  /// A fixed port, or 0 to let the system choose.
  virtual int bind_port() { return 0; }
  /// The job's secret where all ranks know it already (DDP_SECRET). Empty: rank 0 makes a random
  /// one, which then travels as a part of the contact, over a way that strangers cannot read.
  virtual std::string secret() { return {}; }
  /// Rank 0: makes `contact` known to all ranks. Others: returns rank 0's contact, an empty text
  /// where it is not known yet; called again (with the time left) while rank 0 cannot be reached
  /// there. Throws PeerLostError after `timeout`.
  virtual std::string exchange(int rank, const std::string& contact,
                               std::chrono::milliseconds timeout) = 0;
};

struct ControlPlaneOptions {
  std::chrono::milliseconds rendezvous_timeout{300'000};
  std::chrono::milliseconds heartbeat_interval{5'000};
  int heartbeat_misses = 3;  ///< a peer silent for interval * misses counts as lost
  std::chrono::milliseconds collective_timeout{600'000};
  std::string
      bind_address;  ///< of rank 0; empty chooses what peers can reach, loopback on one node
  std::string
      rendezvous_folder;  ///< shared by all nodes, for Slurm without MPI; empty: see rendezvous.hpp
};

/// Why the job fails, as the first rank that knew told it.
struct FailureCause {
  int rank = -1;
  std::string host;
  int64_t step = -1;    ///< -1 before the first step
  std::string where;    ///< bucket or module, as far as known
  std::string message;  ///< the original message
  ExitCode exit_code = ExitCode::PeerLost;
  /// "rank 2 (node3) failed at step 41 in bucket 3: out of memory".
  std::string to_line() const;
};

class ControlPlane {
 public:
  /// Joins the job. Collective. At world size 1 no socket is opened. Throws PeerLostError naming
  /// every missing rank when the rendezvous times out, SettingsError when two processes claim one
  /// rank.
  static std::unique_ptr<ControlPlane> create(const LaunchEnvironment& launch,
                                              std::shared_ptr<Rendezvous> rendezvous,
                                              const ControlPlaneOptions& options = {});
  virtual ~ControlPlane() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  /// Root's value on every rank. Collective; at most 1 MiB.
  virtual std::string broadcast(const std::string& value, int root = 0) = 0;
  /// Every rank's value, indexed by rank. Collective; at most 1 MiB a rank. Rank 0 sends all values
  /// to all ranks: where the root alone reads them, gather() is cheaper.
  virtual std::vector<std::string> all_gather(const std::string& value) = 0;
  /// The same on `root`; the others get nothing and do not wait. Collective; at most 1 MiB a rank.
  virtual std::vector<std::string> gather(const std::string& value, int root = 0) {
    auto values = all_gather(value);
    return rank() == root ? values : std::vector<std::string>();
  }
  /// Collective.
  virtual void barrier() = 0;
  /// True on all ranks if it was true on any. Collective.
  bool agree_any(bool value);
  /// Returns rank 0's `value` if all ranks gave the same, else throws MismatchError with the first
  /// rank that differs and both values. Collective.
  std::string require_equal(const std::string& what, const std::string& value);

  /// What the first-cause line says should this rank die without a word. A lock that is never held
  /// in socket calls, and a copy of `where`; rank 0 is told within 10 ms, in large jobs within a
  /// millisecond a rank. Any thread.
  virtual void set_progress(int64_t step, const std::string& where) = 0;
  /// Tells all ranks why the job fails. Only the first cause counts. Any thread.
  virtual void publish_failure(const FailureCause& cause) = 0;
  /// The first cause, once known. Any thread.
  virtual bool failed() const = 0;
  virtual FailureCause failure() const = 0;
  /// Called once, from the background thread, when a failure becomes known: communicators abort
  /// here so that no thread stays in a collective. Returns a token for remove_failure_callback.
  virtual int add_failure_callback(std::function<void(const FailureCause&)> callback) = 0;
  virtual void remove_failure_callback(int token) = 0;
  /// Ordered end: peers that close after this are not failures. Collective; the destructor of a
  /// plane that was not closed counts as a failure for the peers.
  virtual void close() = 0;
};

}  // namespace ddp
