// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "comm/nccl/nccl_launch.hpp"
#include "comm/nccl/nccl_reductions.hpp"
#include "comm/tuning/all_reduce_table.hpp"
#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

/// Measures all-reduces in captures, on a communicator that nobody uses eagerly. Once a
/// communicator was captured, NCCL orders its eager launches behind its captured ones. This costs
/// small ones 1 us each.
///
/// `launcher` and `reductions` are parts of `communicator`. Returns this rank's times. Collective;
/// the host waits.
std::vector<AllReduceRow> time_all_reduce(Communicator& communicator, NcclLauncher& launcher,
                                          NcclReductions& reductions);

}  // namespace ddp::detail
