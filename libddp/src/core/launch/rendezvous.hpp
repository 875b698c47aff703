// SPDX-License-Identifier: Apache-2.0
// How ranks find each other: the interface, and implementations that need neither MPI nor LibTorch.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "core/launch/launch_environment.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

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

/// Joins the ranks of `membership`, whose hosts the control plane finds out. Collective. Opens no
/// socket at world size 1. On a rendezvous timeout throws PeerLostError naming every missing rank.
/// Throws SettingsError if two processes claim one rank. Ranks of another start of the job, by
/// `launch`, and of another generation are refused.
std::unique_ptr<ControlPlane> create_control_plane(const LaunchEnvironment& launch,
                                                   const Membership& membership,
                                                   std::shared_ptr<Rendezvous> rendezvous,
                                                   const ControlPlaneOptions& options);
/// The same for the first generation.
std::unique_ptr<ControlPlane> create_control_plane(const LaunchEnvironment& launch,
                                                   std::shared_ptr<Rendezvous> rendezvous,
                                                   const ControlPlaneOptions& options = {});

/// Rank 0 listens at a host and port that all ranks know (MASTER_ADDR and MASTER_PORT, or an
/// argument). All ranks also know the secret. Throws SettingsError if the secret is empty. Rank 0
/// binds `bind_address`, or `host`'s address if that is empty.
std::shared_ptr<Rendezvous> make_fixed_rendezvous(const std::string& host, int port,
                                                  const std::string& secret,
                                                  const std::string& bind_address = {});

/// Reads rank 0's contact from `folder`/.ddp_rendezvous.`key`. Returns an empty string and sets
/// `why` if the file is missing, or if others could have written or read it.
std::string read_contact_file(const std::string& folder, const std::string& key, std::string& why);

/// Rank 0 writes its contact and a new secret into `folder`/.ddp_rendezvous.`key`, readable by this
/// user alone. The rendezvous object's destructor removes the file. All nodes see `folder`; `key`
/// names this start of the job. Rank 0 listens at `bind_address`.
std::shared_ptr<Rendezvous> make_file_rendezvous(const std::string& folder, const std::string& key,
                                                 const std::string& bind_address);

}  // namespace ddp::detail
