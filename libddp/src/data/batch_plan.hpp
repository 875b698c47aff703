// SPDX-License-Identifier: Apache-2.0
// The places of the next batch in an epoch's order: pure functions of sampler and position.
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

}  // namespace ddp::detail
