// SPDX-License-Identifier: Apache-2.0
// Rendezvous implementations that need neither MPI nor LibTorch.
#pragma once

#include <memory>
#include <string>

#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

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
/// names this start of the job. `bind_address` as in ControlPlaneOptions.
std::shared_ptr<Rendezvous> make_file_rendezvous(const std::string& folder, const std::string& key,
                                                 const std::string& bind_address);

}  // namespace ddp::detail
