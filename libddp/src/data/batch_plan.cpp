// SPDX-License-Identifier: Apache-2.0
#include "data/batch_plan.hpp"

#include <algorithm>

namespace ddp::detail {

namespace {

// The number of places of the batch at `position`; 0 if there is none.
int64_t batch_extent(const DistributedSampler& sampler, int64_t position, int64_t global_batch_size,
                     bool drop_last) {
  const int64_t remaining = sampler.size() - position;
  if (remaining >= global_batch_size) {
    return global_batch_size;
  }
  const int64_t extent = std::min(sampler.end_place(position) - position, global_batch_size);
  return drop_last && extent < global_batch_size ? 0 : extent;
}

}  // namespace

std::optional<BatchPlan> plan_batch(const DistributedSampler& sampler, int64_t position,
                                    int64_t global_batch_size, bool drop_last) {
  const int64_t extent = batch_extent(sampler, position, global_batch_size, drop_last);
  if (extent <= 0) {
    return std::nullopt;
  }
  BatchPlan plan{position, position + extent, {}};
  for (int64_t place = position + sampler.rank(); place < plan.end; place += sampler.world_size()) {
    plan.indices.push_back(sampler.index_at(place));
  }
  return plan;
}

int64_t count_batches(const DistributedSampler& sampler, int64_t position,
                      int64_t global_batch_size, bool drop_last) {
  const int64_t remaining = std::max<int64_t>(sampler.size() - position, 0);
  const int64_t full = remaining / global_batch_size;
  const int64_t tail =
      batch_extent(sampler, position + full * global_batch_size, global_batch_size, drop_last);
  return full + (tail > sampler.rank() ? 1 : 0);
}

}  // namespace ddp::detail
