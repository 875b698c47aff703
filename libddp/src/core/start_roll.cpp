// SPDX-License-Identifier: Apache-2.0
#include "core/start_roll.hpp"

#include <fcntl.h>
#include <unistd.h>

#include "core/tcp_socket.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

StartRoll::StartRoll(const LaunchEnvironment& launch, const EnvironmentLookup& environment)
    : world_size_(launch.world_size), local_world_size_(launch.local_world_size) {
  // Set by Open MPI, and by Slurm with PMIx. One launcher may run several jobs, one namespace each.
  const auto folder = environment("PMIX_SERVER_TMPDIR");
  const auto name = environment("PMIX_NAMESPACE");
  if (!folder || folder->empty() || !name || name->empty() ||
      name->find('/') != std::string::npos || local_world_size_ <= 1) {
    return;
  }
  prefix_ = concat(*folder, "/ddp_start_", *name, "_");
  const UniqueFd fd(
      open(file_of(launch.local_rank).c_str(), O_CREAT | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd.valid()) {
    prefix_.clear();
  }
}

std::string StartRoll::file_of(int local_rank) const {
  return prefix_ + std::to_string(local_rank);
}

std::string StartRoll::tell_missing() const {
  if (prefix_.empty()) {
    return {};
  }
  std::string missing;
  for (int rank = 0; rank < local_world_size_; ++rank) {
    if (access(file_of(rank).c_str(), F_OK) != 0) {
      missing += concat(missing.empty() ? "" : ", ", rank);
    }
  }
  if (local_world_size_ == world_size_) {
    return missing.empty() ? "; every rank has begun it" : "; missing: rank " + missing;
  }
  return missing.empty() ? concat("; every rank of ", host_name(), " has begun it")
                         : concat("; missing of ", host_name(), ": local rank ", missing);
}

}  // namespace ddp::detail
