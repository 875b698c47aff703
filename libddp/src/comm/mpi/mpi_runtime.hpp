// SPDX-License-Identifier: Apache-2.0
// MPI of this process: one thread makes every MPI call, from MPI_Init_thread to MPI_Finalize. MPI
// can be initialised only once per process, so MPI_Finalize runs at process exit. The control plane
// of the last context stays open until then to name lost or frozen ranks.
//
// A Context owns the runtime (before the control plane, which may use it as rendezvous) and shares
// it with the MPI communicators. Several runtimes may exist, concurrently or in sequence; all ranks
// make them in the same order. This header does not include mpi.h.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "ddp/core/membership.hpp"

namespace ddp {
class ControlPlane;
}

namespace ddp::detail {

class MpiRuntime {
 public:
  /// Initialises MPI if necessary. Throws SettingsError if this build has no MPI, MPI was
  /// finalized, or other code initialised it below MPI_THREAD_MULTIPLE. Call only if
  /// LaunchEnvironment::use_mpi is true: otherwise MPI_Init ends the process. Throws PeerLostError
  /// if a rank does not call it within `timeout`.
  static std::shared_ptr<MpiRuntime> create(std::chrono::milliseconds timeout);

  /// True if this build has MPI.
  static bool is_built_in();

  virtual ~MpiRuntime() = default;

  /// Of the ranks that MPI connects, without hosts.
  virtual const Membership& membership() const = 0;
  int rank() const { return membership().rank; }
  int world_size() const { return membership().world_size; }

  /// Makes the next generation's runtime, of `ranks` of this one in their new order. Collective
  /// over these ranks. This runtime may be finalized, but not abandoned. Throws PeerLostError if a
  /// rank does not call it within `timeout`.
  virtual std::shared_ptr<MpiRuntime> meet_again(const std::vector<int>& ranks,
                                                 std::chrono::milliseconds timeout) = 0;

  /// Returns root's value on every rank of the world. Collective; the host waits. Throws
  /// PeerLostError after `timeout`; MPI is then unusable, as after abandon().
  virtual std::string broadcast(const std::string& value, int root,
                                std::chrono::milliseconds timeout) = 0;

  /// Ends in order after the work of all communicators; remaining communicators throw. At process
  /// exit libddp calls MPI_Finalize (a collective) if it had initialised MPI and no runtime was
  /// abandoned. Idempotent. Does nothing after abandon().
  virtual void finalize() = 0;

  /// True if libddp calls MPI_Finalize and this process uses no other runtime. The control plane is
  /// then passed to keep_open_until_end() instead of being closed.
  virtual bool ends_mpi() const = 0;
  /// Call after finalize(), on all ranks. `control_plane` stays open until MPI_Finalize returns at
  /// process exit, or until the next runtime is made. Its heartbeats end waits for a lost or frozen
  /// rank and name that rank.
  virtual void keep_open_until_end(std::shared_ptr<ControlPlane> control_plane) = 0;

  /// Call if a peer is lost or this rank fails. This process then never calls MPI_Finalize, which
  /// would never return. Pending operations end with PeerLostError(reason). Idempotent, any
  /// thread. The destructor calls it for a runtime that was not finalized.
  virtual void abandon(const std::string& reason) = 0;
};

}  // namespace ddp::detail
