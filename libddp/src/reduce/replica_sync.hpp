// SPDX-License-Identifier: Apache-2.0
// Rank 0's tensors on all ranks, a few large broadcasts instead of many small ones.
#pragma once

#include <string>
#include <vector>

#include "ddp/comm/communicator.hpp"
#include "ddp/reduce/named_parameter.hpp"

namespace ddp::detail {

/// Overwrites `tensors` with `root`'s values, packed by dtype in chunks of at most `chunk_bytes`
/// (PyTorch's 250 MiB). The caller's current stream waits, the host does not (CPU: it does).
/// Collective.
void broadcast_coalesced(Communicator& communicator, const std::vector<at::Tensor>& tensors,
                         int root, int64_t chunk_bytes = int64_t{250} << 20);

/// Every rank's text, indexed by rank. The host waits. Collective.
std::vector<std::string> all_gather_text(Communicator& communicator, const std::string& text);

/// Root's text on every rank. The host waits. Collective.
std::string broadcast_text(Communicator& communicator, const std::string& text, int root);

}  // namespace ddp::detail
