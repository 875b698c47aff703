// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "comm/collective_check.hpp"
#include "comm/communicator_state.hpp"
#include "comm/mpi_runtime.hpp"
#include "core/rank_position.hpp"
#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

struct MpiCommunicatorOptions {
  std::chrono::milliseconds timeout{600'000};
  std::chrono::milliseconds first_step_timeout{1'800'000};
  CollectiveFailureHandler on_failure;
  std::shared_ptr<CollectiveCheck> check;  ///< for the world; null: calls are not compared
  WatchPosition watch;  ///< receives probes of the world and of groups split from it
  /// Longer messages are cut into pieces of this many elements: MPI counts in int, and libraries
  /// sum the counts of all ranks in int. Tests make it small.
  int64_t max_count = int64_t{1} << 28;
};

/// The world of `runtime`, for CPU tensors. Collective only in that all ranks must make it.
CommunicatorPtr make_mpi_communicator(std::shared_ptr<MpiRuntime> runtime,
                                      const MpiCommunicatorOptions& options);

}  // namespace ddp::detail
