// SPDX-License-Identifier: Apache-2.0
// MPI of this process: one thread makes every MPI call, from MPI_Init_thread to MPI_Finalize. MPI
// can be initialised once in a process, so MPI_Finalize waits until the process ends. The control
// plane of the last context stays open until then: a rank that is lost or frozen is named.
//
// A runtime is owned by a Context (before the control plane, which may find its rendezvous through
// it) and shared by the MPI communicators. Several may live at once and one after the other; all
// ranks make them in the same order. Nothing of mpi.h is seen here.
#pragma once

#include <chrono>
#include <memory>
#include <string>

namespace ddp {
class ControlPlane;
}

namespace ddp::detail {

class MpiRuntime {
 public:
  /// Initialises MPI where nobody did. Throws SettingsError where this build has no MPI, where MPI
  /// was finalized, or where someone else initialised it with less than MPI_THREAD_MULTIPLE. Call
  /// it only where LaunchEnvironment::use_mpi says that MPI works: elsewhere MPI_Init ends the
  /// process. Throws PeerLostError where a rank does not come within `timeout`.
  static std::shared_ptr<MpiRuntime> create(std::chrono::milliseconds timeout);

  /// True where this build has MPI at all.
  static bool is_built_in();

  virtual ~MpiRuntime() = default;

  virtual int rank() const = 0;        ///< in MPI_COMM_WORLD
  virtual int world_size() const = 0;  ///< of MPI_COMM_WORLD

  /// Root's value on every rank of the world. Collective; the host waits. Throws PeerLostError
  /// after `timeout` (MPI is then unusable, as after abandon()).
  virtual std::string broadcast(const std::string& value, int root,
                                std::chrono::milliseconds timeout) = 0;

  /// Ordered end, when the work of all communicators is done: those that are left throw. The
  /// process calls MPI_Finalize (a collective) at its end, if libddp had initialised MPI and no
  /// runtime was abandoned. Idempotent. Does nothing after abandon().
  virtual void finalize() = 0;

  /// True where libddp calls MPI_Finalize and no other runtime of this process is in use: the
  /// control plane then goes to watch_end() instead of being closed.
  virtual bool ends_mpi() const = 0;
  /// After finalize(), on all ranks. `control_plane` stays open until MPI_Finalize returned at the
  /// end of the process, or until the next runtime is made. Its heartbeats end a wait for a rank
  /// that is lost or frozen, and name that rank.
  virtual void watch_end(std::shared_ptr<ControlPlane> control_plane) = 0;

  /// A peer is lost or this rank fails: MPI_Finalize would wait for ever; this process never calls
  /// it.
  /// Pending operations end with PeerLostError(reason). Idempotent, any thread. The destructor of a
  /// runtime that was neither finalized nor abandoned abandons it.
  virtual void abandon(const std::string& reason) = 0;
};

}  // namespace ddp::detail
