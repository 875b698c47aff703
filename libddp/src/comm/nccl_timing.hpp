// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "comm/all_reduce_table.hpp"
#include "comm/nccl_launch.hpp"
#include "comm/nccl_memory.hpp"
#include "comm/nccl_reductions.hpp"
#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

/// Measures the all-reduce algorithms in captures, on a communicator that nobody uses eagerly. Once
/// a communicator was captured, NCCL orders its eager launches behind its captured ones. This costs
/// small ones 1 us each.
class NcclAllReduceTimer {
 public:
  /// Parts of one communicator, which outlives the timer. `memory` may be null.
  NcclAllReduceTimer(Communicator& communicator, NcclLauncher& launcher, NcclReductions& reductions,
                     NcclMemory* memory)
      : communicator_(communicator),
        launcher_(launcher),
        reductions_(reductions),
        memory_(memory) {}

  /// Times of this rank. Collective; the host waits.
  std::vector<AllReduceRow> rows();

 private:
  double time(float* data, int64_t num_bytes, AllReduceAlgorithm algorithm);

  Communicator& communicator_;
  NcclLauncher& launcher_;
  NcclReductions& reductions_;
  NcclMemory* const memory_;
};

}  // namespace ddp::detail
