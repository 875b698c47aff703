// SPDX-License-Identifier: Apache-2.0
// Hashes of this rank's gradients before they are reduced (train.replay_check_every).
#pragma once

#include <ATen/Functions.h>

#include <cstdint>
#include <exception>
#include <vector>

#include "ops/shared/tensor_hash.hpp"

namespace ddp::detail {

/// Ends a rehearsal behind its backward. Autograd's engine passes on std::exceptions only.
struct RehearsalEnd : std::exception {
  const char* what() const noexcept override {
    return "a rehearsed step has ended; the program must not catch this exception";
  }
};

/// Given to a model's GradientArena, records its backwards. In a rehearsal nothing is sent, and the
/// backward ends with RehearsalEnd.
class GradientProbe {
 public:
  /// The memory stays, so that a CUDA graph may write it.
  GradientProbe(bool is_rehearsal, size_t max_buckets, at::Device device)
      : is_rehearsal_(is_rehearsal),
        hashes_(at::zeros({static_cast<int64_t>(max_buckets)},
                          at::TensorOptions().dtype(at::kLong).device(device))) {}

  bool is_rehearsal() const { return is_rehearsal_; }
  /// Call on the stream behind the gradients of this bucket.
  void record(int bucket, const at::Tensor& buffer) const {
    hashes_.narrow(0, bucket, 1).copy_(ops::hash_tensors({buffer}, hashes_.device()));
  }
  /// int64 [max_buckets]
  const at::Tensor& hashes() const { return hashes_; }

 private:
  const bool is_rehearsal_;
  const at::Tensor hashes_;
};

inline bool is_rehearsal(const GradientProbe* probe) {
  return probe != nullptr && probe->is_rehearsal();
}

}  // namespace ddp::detail
