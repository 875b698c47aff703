// SPDX-License-Identifier: Apache-2.0
// Compares the replicas of a model and sends one rank's tensors to all.
#pragma once

#include <vector>

#include "ddp/comm/communicator.hpp"
#include "ddp/reduce/model_tensors.hpp"
#include "ddp/reduce/options.hpp"

namespace ddp::detail {

/// Compares model and settings over the ranks before any gradient is sent. All ranks throw
/// MismatchError with both sides of the first difference. Collective.
void check_equal_across_ranks(Communicator& communicator, const ModelTensors& tensors,
                              const DdpOptions& options);

/// Throws SettingsError naming the first unsupported tensor: expanded or complex tensors, and
/// parameters computed by an operation. Ranks with equal models give the same result.
void check_supported(const ModelTensors& tensors);

/// Overwrites `tensors` with `root`'s values, packed by dtype in chunks of at most `chunk_bytes`
/// (PyTorch's 250 MiB), and raises their versions on the other ranks. The caller's current stream
/// waits, the host does not (CPU: it does). Collective.
void broadcast_coalesced(Communicator& communicator, const std::vector<at::Tensor>& tensors,
                         int root, int64_t chunk_bytes = int64_t{250} << 20);

/// Seeds the default generators of CPU and GPUs by `rank` and one draw from the CPU's, which is
/// equal on all ranks that were seeded equally. Rank 0 is not seeded again: it draws the
/// numbers of a job of one rank. So later models begin with the same weights in both jobs.
void seed_ranks_differently(int rank);

}  // namespace ddp::detail
