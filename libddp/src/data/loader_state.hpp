// SPDX-License-Identifier: Apache-2.0
// Common to all loaders: the batch size of the options, the state in a checkpoint, and the error
// for epochs without a batch.
#pragma once

#include <cstdint>

#include "ddp/core/state_dict.hpp"
#include "ddp/data/distributed_sampler.hpp"
#include "ddp/data/options.hpp"

namespace ddp::detail {

/// A loader's place after the training loop consumed a batch.
struct Place {
  int64_t epoch = 0;
  int64_t position = 0;
};

/// Samples of all ranks in a batch.
int64_t global_batch_size(const DistributedSampler& sampler, const LoaderOptions& options);
/// Throws SettingsError for invalid options.
void check_loader_options(const DistributedSampler& sampler, const LoaderOptions& options);

/// A copy of `sampler` without the permutation, for counting.
DistributedSampler shape_of(const DistributedSampler& sampler);

/// Throws an error with reason and fix when an epoch holds no batch for this rank.
[[noreturn]] void fail_without_batch(const DistributedSampler& shape, int64_t batch_size);

StateDict make_loader_state(const DistributedSampler& sampler, int64_t epoch, int64_t position);
/// Throws MismatchError if the state belongs to another order of samples.
Place read_loader_state(const StateDict& state, const DistributedSampler& sampler);

}  // namespace ddp::detail
