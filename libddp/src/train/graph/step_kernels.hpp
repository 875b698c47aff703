// SPDX-License-Identifier: Apache-2.0
// The kernels of a captured step: inputs, outputs and fills.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "train/graph/published_slot.hpp"

namespace ddp::detail {

constexpr int kMaxFeedCopies = 64;
constexpr int kMaxFeedNumbers = 128;

struct FeedCopy {
  const void* from;
  void* to;
  uint64_t bytes;
};

/// Passed by value: a launch copies a kernel's arguments. So the host can prepare the next step at
/// once, without waiting and without rotating pinned memory.
struct FeedArguments {
  FeedCopy copies[kMaxFeedCopies];
  float numbers[kMaxFeedNumbers];
  uint64_t sequence;
  uint64_t* sequence_target;  ///< device
  float* numbers_target;      ///< device [num_numbers]
  int num_copies;
  int num_numbers;
};

/// Copies all regions and numbers. Regions must not overlap.
cudaError_t launch_feed(const FeedArguments& arguments, cudaStream_t stream);
/// Sets other arguments of a captured feed for later launches of `graph`; launches in flight keep
/// theirs. Sizes must be the captured ones.
cudaError_t set_feed(cudaGraphExec_t graph, cudaGraphNode_t node, const FeedArguments& arguments);

enum class NumberType : uint8_t { Float, Double, Half, BFloat16, Int64, Int32, Byte };

struct PublishArguments {
  const void* numbers[kMaxPublished];
  NumberType types[kMaxPublished];
  int count;
  const uint64_t* sequence;  ///< device
  PublishedSlot* slots;      ///< mapped host memory [num_slots]
  int num_slots;
};

/// slots[*sequence % num_slots] = {*sequence, numbers}.
cudaError_t launch_publish(const PublishArguments& arguments, cudaStream_t stream);

/// Adds a kernel node equivalent to the one-row `memset`, after the `num_after` nodes.
cudaError_t add_fill(cudaGraph_t graph, const cudaGraphNode_t* after, size_t num_after,
                     const cudaMemsetParams& memset, cudaGraphNode_t* node);

}  // namespace ddp::detail
