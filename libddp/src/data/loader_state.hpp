// SPDX-License-Identifier: Apache-2.0
// What all loaders share: the batch size that options mean, what a checkpoint keeps, and what is
// said where no batch can be.
#pragma once

#include <cstdint>

#include "ddp/core/state_dict.hpp"
#include "ddp/data/distributed_sampler.hpp"
#include "ddp/data/options.hpp"

namespace ddp::detail {

/// Where a loader stands when the training loop has consumed a batch.
struct Place {
  int64_t epoch = 0;
  int64_t position = 0;
};

/// Samples of all ranks in a batch.
int64_t global_batch_size(const DistributedSampler& sampler, const LoaderOptions& options);
/// Throws SettingsError.
void check_loader_options(const DistributedSampler& sampler, const LoaderOptions& options);

/// `sampler`'s numbers without a permutation, for counting.
DistributedSampler shape_of(const DistributedSampler& sampler);

/// An epoch holds no batch for this rank: says why and what helps.
[[noreturn]] void fail_without_batch(const DistributedSampler& shape, int64_t batch_size);

StateDict make_loader_state(const DistributedSampler& sampler, int64_t epoch, int64_t position);
/// Throws MismatchError where the state is of another order of samples.
Place read_loader_state(const StateDict& state, const DistributedSampler& sampler);

}  // namespace ddp::detail
