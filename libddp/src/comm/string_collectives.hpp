// SPDX-License-Identifier: Apache-2.0
// Exchanges small strings over a communicator when no control plane is available.
#pragma once

#include <string>
#include <vector>

#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

/// Returns every rank's string, indexed by rank. The host waits. Collective.
std::vector<std::string> all_gather_string(Communicator& communicator, const std::string& text);

/// Returns root's string on every rank. The host waits. Collective.
std::string broadcast_string(Communicator& communicator, const std::string& text, int root);

}  // namespace ddp::detail
