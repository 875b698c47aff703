// SPDX-License-Identifier: Apache-2.0
// The batches of an epoch's order: pure functions of sampler and position.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "ddp/data/distributed_sampler.hpp"

namespace ddp::detail {

struct BatchPlan {
  int64_t begin = 0;  ///< places [begin, end) of all ranks together
  int64_t end = 0;
  std::vector<int64_t> indices;  ///< this rank's samples
};

/// The batch that begins at `position` of the sampler's epoch; nullopt at its end. Rank r takes
/// begin + r, begin + r + world_size, …: the DistributedSampler's dealing if the world size divides
/// the global batch. Otherwise the first ranks get one sample more. Every global batch holds the
/// same samples at any world size. The sampler's options decide whether the last batch is padded,
/// cut or left as is; `drop_last` drops it if not full. Only without padding can some ranks' part
/// be empty.
std::optional<BatchPlan> plan_batch(const DistributedSampler& sampler, int64_t position,
                                    int64_t global_batch_size, bool drop_last);

/// Batches of this rank left in the sampler's epoch after `position`.
int64_t count_batches(const DistributedSampler& sampler, int64_t position,
                      int64_t global_batch_size, bool drop_last);

/// All batches of a rank in one epoch, for a loader that keeps images on the device.
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
