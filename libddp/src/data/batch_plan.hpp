// SPDX-License-Identifier: Apache-2.0
// Which places of an epoch's order make the next batch: pure functions of sampler and position.
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

/// The batch that begins at `position` of the sampler's epoch; nothing at its end. Rank r takes
/// begin + r, begin + r + world_size, …: where the global batch divides by the world size, that is
/// the DistributedSampler's dealing; where it does not, the first ranks get one sample more, and
/// every global batch holds the same samples at any world size. The last batch is padded, cut or
/// left as the sampler's options say, and left out with `drop_last` where it is not full. It may
/// hold nothing for some ranks only where the sampler does not pad.
std::optional<BatchPlan> plan_batch(const DistributedSampler& sampler, int64_t position,
                                    int64_t global_batch_size, bool drop_last);

/// Batches of this rank in the sampler's epoch from `position` on.
int64_t count_batches(const DistributedSampler& sampler, int64_t position,
                      int64_t global_batch_size, bool drop_last);

}  // namespace ddp::detail
