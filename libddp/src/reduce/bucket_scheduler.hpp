// SPDX-License-Identifier: Apache-2.0
// Counts ready gradients per bucket: the reducer's state machine, without tensors. Not thread safe:
// the caller holds the reducer's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "reduce/bucket_layout.hpp"

namespace ddp::detail {

class BucketScheduler {
 public:
  enum class Mark {
    Pending,      ///< the bucket still waits for other gradients
    BucketReady,  ///< that was the bucket's last gradient
    AllReady,     ///< … and the last bucket
    Twice,        ///< the parameter was ready before in this pass
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

}  // namespace ddp::detail
