// SPDX-License-Identifier: Apache-2.0
// Which parameter's gradient lies where: a pure function from parameters and limits to buckets,
// with the rules of PyTorch's compute_bucket_assignment_by_size. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

namespace ddp {

/// What the layout needs to know of a parameter that requires a gradient.
struct ParameterSpec {
  int64_t numel = 0;
  int64_t element_bytes = 4;  ///< of the gradient's dtype
  int key = 0;  ///< parameters of one bucket share (device, leaf, grad, wire dtype), numbered by
                ///< the caller
};

struct BucketLayoutOptions {
  /// Bucket b of a key closes once it holds limits_bytes[min(b, last)] bytes or more; empty means
  /// one bucket a key. A bucket may exceed its limit, because no parameter is split.
  std::vector<int64_t> limits_bytes;
  /// Instead of limits, with an order: after each of these numbers of parameters (ascending, the
  /// last being all of them) every key's bucket closes.
  std::vector<int> cuts = {};
  int64_t alignment_bytes = 64;  ///< of each gradient inside the arena
  int64_t world_size = 1;        ///< a bucket's element count is a multiple of it
};

struct Bucket {
  int key = 0;
  std::vector<int> parameters;   ///< indices into the specs, in the order of the gradients
  std::vector<int64_t> offsets;  ///< of each gradient in elements, from the bucket's begin
  int64_t begin = 0;             ///< in elements, from the begin of the key's arena
  int64_t numel = 0;             ///< with padding
  int launch = 0;  ///< buckets of equal number, next to each other, are reduced by one group call
};

struct BucketLayout {
  struct Place {
    int bucket = -1;
    int index = -1;  ///< within the bucket
  };
  int version = 0;                   ///< grows with every rebuild
  std::vector<Bucket> buckets;       ///< in launch order
  std::vector<Place> places;         ///< per parameter
  std::vector<int64_t> arena_numel;  ///< elements used of each key's arena
};

/// Without `order`: parameters are taken in registration order and the bucket list is reversed,
/// since backward meets the last registered ones first. With `order` (the order in which gradients
/// became ready; a permutation of all parameters): taken in that order and not reversed.
BucketLayout assign_buckets(const std::vector<ParameterSpec>& parameters,
                            const BucketLayoutOptions& options, const std::vector<int>& order = {});

/// Elements that suffice for the arena of `key` under every layout of these parameters with these
/// limits, so that a rebuild never allocates.
int64_t max_arena_numel(const std::vector<ParameterSpec>& parameters,
                        const BucketLayoutOptions& options, int key);

}  // namespace ddp
