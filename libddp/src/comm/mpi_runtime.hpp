// SPDX-License-Identifier: Apache-2.0
// MPI of this process: one thread that makes every MPI call, from MPI_Init_thread to MPI_Finalize.
//
// Owned by the Context (before the control plane, which may find its rendezvous through it) and
// shared by the MPI communicators. Nothing of mpi.h is seen here.
#pragma once

#include <chrono>
#include <memory>
#include <string>

namespace ddp::detail {

class MpiRuntime {
 public:
  /// Initialises MPI where nobody did. Throws SettingsError where this build has no MPI, or where
  /// MPI was initialised by someone else with less than MPI_THREAD_SERIALIZED. Call it only where
  /// LaunchEnvironment::use_mpi says that MPI works: elsewhere MPI_Init ends the process. Throws
  /// PeerLostError where a rank does not come within `timeout`.
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

  /// Ordered end, when all communicators are gone: MPI_Finalize (a collective) if create() had
  /// initialised MPI. Idempotent. Does nothing after abandon().
  virtual void finalize() = 0;

  /// A peer is lost or this rank fails: MPI_Finalize would wait for ever and is never called.
  /// Pending operations end with PeerLostError(reason). Idempotent, any thread. The destructor of a
  /// runtime that was neither finalized nor abandoned abandons it.
  virtual void abandon(const std::string& reason) = 0;
};

}  // namespace ddp::detail
