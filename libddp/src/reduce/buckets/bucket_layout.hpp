// SPDX-License-Identifier: Apache-2.0
// Assigns gradients to buckets by a pure function of parameters and limits, with the rules of
// PyTorch's compute_bucket_assignment_by_size. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ddp/core/membership.hpp"

namespace ddp {

/// A parameter that requires a gradient, as the layout sees it.
struct ParameterSpec {
  int64_t numel = 0;
  int64_t element_bytes = 4;  ///< of the gradient's dtype
  int key = 0;  ///< parameters of one bucket share a key: (parameter dtype, gradient dtype),
                ///< numbered by the caller; all parameters of a model are on one device
  bool is_sparse = false;  ///< its gradient: GradientArena
};

struct BucketLayoutOptions {
  /// Bucket b of a key closes once it holds limits_bytes[min(b, last)] bytes or more. Empty: one
  /// bucket per key. Parameters are never split, so a bucket may exceed its limit.
  std::vector<int64_t> limits_bytes;
  /// Replaces the limits, with an order: every key's bucket closes after each of these numbers of
  /// parameters (ascending; the last is the number of all parameters).
  std::vector<int> cuts = {};
  int64_t alignment_bytes = 64;  ///< of each gradient inside the arena
  Membership membership = {};    ///< a bucket's element count is a multiple of its world size
};

struct Bucket {
  int key = 0;
  std::vector<int> parameters;   ///< indices into the specs, in the order of the gradients
  std::vector<int64_t> offsets;  ///< of each gradient in elements, from the bucket's start
  int64_t begin = 0;             ///< in elements, from the start of the key's arena
  int64_t numel = 0;             ///< with padding
  int launch = 0;                ///< adjacent buckets of equal number are reduced by one group call
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

/// Without `order`, parameters are taken in registration order and the bucket list is reversed,
/// because backward reaches the last registered parameters first. With `order` (the order in which
/// gradients became ready; a permutation of all parameters), parameters are taken in that order and
/// the list is not reversed.
BucketLayout assign_buckets(const std::vector<ParameterSpec>& parameters,
                            const BucketLayoutOptions& options, const std::vector<int>& order = {});

/// Upper bound of the arena's elements of `key` under every layout of these parameters with these
/// limits, so that a rebuild never allocates.
int64_t max_arena_numel(const std::vector<ParameterSpec>& parameters,
                        const BucketLayoutOptions& options, int key);

namespace detail {

/// Counts ready gradients per bucket: the reducer's state machine, without tensors. Not thread
/// safe: the caller holds the reducer's lock.
class BucketScheduler {
 public:
  enum class Mark {
    Pending,      ///< the bucket still waits for other gradients
    BucketReady,  ///< that was the bucket's last gradient
    AllReady,     ///< the same, and this was the last bucket
    Twice,        ///< the parameter was already ready in this pass
  };

  void reset(const BucketLayout& layout) {
    places_ = layout.places;
    sizes_.clear();
    for (const Bucket& bucket : layout.buckets) {
      sizes_.push_back(static_cast<int>(bucket.parameters.size()));
    }
    begin_pass();
  }

  void begin_pass() {
    pending_ = sizes_;
    num_pending_buckets_ = static_cast<int>(sizes_.size());
    ready_.assign(places_.size(), false);
    num_ready_ = 0;
  }

  Mark mark_ready(int parameter) {
    const auto index = static_cast<size_t>(parameter);
    if (ready_[index]) {
      return Mark::Twice;
    }
    ready_[index] = true;
    ++num_ready_;
    if (--pending_[static_cast<size_t>(places_[index].bucket)] > 0) {
      return Mark::Pending;
    }
    return --num_pending_buckets_ == 0 ? Mark::AllReady : Mark::BucketReady;
  }

  bool is_ready(int parameter) const { return ready_[static_cast<size_t>(parameter)]; }
  int num_ready() const { return num_ready_; }
  bool all_ready() const { return num_pending_buckets_ == 0; }

 private:
  std::vector<BucketLayout::Place> places_;
  std::vector<int> sizes_;
  std::vector<int> pending_;
  std::vector<bool> ready_;
  int num_pending_buckets_ = 0;
  int num_ready_ = 0;
};

}  // namespace detail
}  // namespace ddp
