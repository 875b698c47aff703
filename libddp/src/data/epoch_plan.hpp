// SPDX-License-Identifier: Apache-2.0
// All batches of a rank in one epoch, planned at once, for a loader that keeps images on the
// device.
#pragma once

#include <cstdint>
#include <vector>

#include "ddp/data/distributed_sampler.hpp"

namespace ddp::detail {

struct EpochPlan {
  int64_t epoch = 0;
  std::vector<int32_t> indices;  ///< this rank's samples, in the order it consumes them
  struct Extent {
    int64_t size = 0;  ///< samples of this rank
    int64_t end = 0;   ///< places that all ranks have consumed after this batch
  };
  std::vector<Extent> batches;
};

/// All batches that plan_batch() returns from `position` on, until a batch has no sample of this
/// rank. Sets the sampler's epoch if different. `sampler.size()` must fit 32 bits.
EpochPlan plan_epoch(DistributedSampler& sampler, int64_t epoch, int64_t position,
                     int64_t global_batch_size, bool drop_last);

}  // namespace ddp::detail
