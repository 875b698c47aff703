// SPDX-License-Identifier: Apache-2.0
// The ways to find rank 0 that need neither MPI nor LibTorch.
#pragma once

#include <memory>
#include <string>

#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// Rank 0 listens at a host and port all ranks know (MASTER_ADDR and MASTER_PORT, or an argument);
/// the secret is known beforehand too. Throws SettingsError where it is empty. Rank 0 binds
/// `bind_address`, or, where that is empty, what `host` resolves to.
std::shared_ptr<Rendezvous> make_fixed_rendezvous(const std::string& host, int port,
                                                  const std::string& secret,
                                                  const std::string& bind_address = {});

/// What rank 0 wrote into `folder`/.ddp_rendezvous.`key`. Empty where the file is not there yet, or
/// is none that only this user can have written and can read; `why` tells which.
std::string read_contact_file(const std::string& folder, const std::string& key, std::string& why);

/// Rank 0 writes its contact, with a new secret, into `folder`/.ddp_rendezvous.`key`, readable by
/// this user alone; it is removed when the rendezvous object goes. `folder` is seen by all nodes,
/// `key` names this start of the job. `bind_address` as in ControlPlaneOptions.
std::shared_ptr<Rendezvous> make_file_rendezvous(const std::string& folder, const std::string& key,
                                                 const std::string& bind_address);

}  // namespace ddp::detail
