// SPDX-License-Identifier: Apache-2.0
#include "data/epoch_plan.hpp"

#include "data/batch_plan.hpp"

namespace ddp::detail {

EpochPlan plan_epoch(DistributedSampler& sampler, int64_t epoch, int64_t position,
                     int64_t global_batch_size, bool drop_last) {
  if (sampler.epoch() != epoch) {
    sampler.set_epoch(epoch);
  }
  EpochPlan plan{.epoch = epoch, .indices = {}, .batches = {}};
  while (const auto batch = plan_batch(sampler, position, global_batch_size, drop_last)) {
    if (batch->indices.empty()) {
      break;
    }
    for (int64_t index : batch->indices) {
      plan.indices.push_back(static_cast<int32_t>(index));
    }
    position = batch->end;
    plan.batches.push_back({static_cast<int64_t>(batch->indices.size()), position});
  }
  return plan;
}

}  // namespace ddp::detail
