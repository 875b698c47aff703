// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "reduce/bucket_reductions.hpp"
#include "reduce/bucket_tuner.hpp"
#include "reduce/buffer_broadcast.hpp"
#include "reduce/gradient_arena.hpp"
#include "reduce/pass_timing.hpp"
#include "reduce/unused_parameters.hpp"
#include "reduce/weighted_mean.hpp"

namespace ddp::detail {

/// What a Reducer is made of; each part has one subject and knows only the parts above it.
struct ReducerParts {
  ReducerParts(NamedParameters parameters, CommunicatorPtr communicator_in,
               const DdpOptions& options_in)
      : communicator(std::move(communicator_in)),
        options(options_in),
        gradients(std::move(parameters), communicator, options),
        mean(communicator, gradients),
        reductions(communicator, gradients, mean),
        unused(communicator, options, gradients.parameters().size()),
        tuner(communicator, options, gradients, reductions),
        timing(communicator->device(), /*marks_replays=*/communicator->world_size() > 1),
        buffers(communicator) {}

  const CommunicatorPtr communicator;
  const DdpOptions options;
  GradientArena gradients;
  WeightedMean mean;
  BucketReductions reductions;
  UnusedParameters unused;
  BucketTuner tuner;
  PassTiming timing;
  BufferBroadcast buffers;
};

}  // namespace ddp::detail
