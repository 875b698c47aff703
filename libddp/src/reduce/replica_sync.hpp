// SPDX-License-Identifier: Apache-2.0
// Sends rank 0's tensors to all ranks in a few large broadcasts instead of many small ones.
#pragma once

#include <vector>

#include "comm/string_collectives.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/core/state_dict.hpp"

namespace ddp::detail {

/// Overwrites `tensors` with `root`'s values, packed by dtype in chunks of at most `chunk_bytes`
/// (PyTorch's 250 MiB). The caller's current stream waits, the host does not (CPU: it does).
/// Collective.
void broadcast_coalesced(Communicator& communicator, const std::vector<at::Tensor>& tensors,
                         int root, int64_t chunk_bytes = int64_t{250} << 20);

}  // namespace ddp::detail
