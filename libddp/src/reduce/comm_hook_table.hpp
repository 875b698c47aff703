// SPDX-License-Identifier: Apache-2.0
// The communication hooks that ddp.comm_hook can name.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ddp/reduce/comm_hook.hpp"
#include "ddp/reduce/data_parallel_model.hpp"

namespace ddp::detail {

/// The values of ddp.comm_hook and their names. "none" comes first.
std::vector<std::pair<std::string, CommHookType>> comm_hook_names();

/// nullptr for None: the reducer itself all-reduces.
std::shared_ptr<CommHook> make_comm_hook(const DdpOptions& options);

}  // namespace ddp::detail
