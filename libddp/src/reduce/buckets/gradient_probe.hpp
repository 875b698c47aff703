// SPDX-License-Identifier: Apache-2.0
// Hashes of this rank's gradients before they are reduced (train.replay_check_every).
#pragma once

#include <ATen/Functions.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <utility>

#include "ops/shared/tensor_hash.hpp"

namespace ddp::detail {

/// Ends a rehearsal behind its backward. Autograd's engine passes on std::exceptions only.
struct RehearsalEnd : std::exception {
  const char* what() const noexcept override {
    return "a rehearsed step has ended; the program must not catch this exception";
  }
};

/// Given to a model's GradientArena, records its backwards. In a rehearsal nothing is sent, and the
/// backward ends with RehearsalEnd. A step records as much as its rehearsal: up to the end of its
/// first synchronised backward, of whichever model.
class GradientProbe {
 public:
  /// The memory stays, so that a CUDA graph may write it. The probes of a step share `is_open`.
  GradientProbe(bool is_rehearsal, size_t max_buckets, at::Device device,
                std::shared_ptr<bool> is_open)
      : is_rehearsal_(is_rehearsal),
        is_open_(std::move(is_open)),
        hashes_(at::zeros({static_cast<int64_t>(max_buckets)},
                          at::TensorOptions().dtype(at::kLong).device(device))) {}

  bool is_rehearsal() const { return is_rehearsal_; }
  /// Call at the start of a step.
  void open() const { *is_open_ = true; }
  /// Call on the stream behind the gradients of this bucket.
  void record(int bucket, const at::Tensor& buffer) const {
    if (!*is_open_) {
      return;
    }
    hashes_.narrow(0, bucket, 1).copy_(ops::hash_tensors({buffer}, hashes_.device()));
  }
  /// Call at the end of a synchronised backward. Throws RehearsalEnd in a rehearsal.
  void end_backward() const {
    *is_open_ = false;
    if (is_rehearsal_) {
      throw RehearsalEnd();
    }
  }
  /// int64 [max_buckets]
  const at::Tensor& hashes() const { return hashes_; }

 private:
  const bool is_rehearsal_;
  const std::shared_ptr<bool> is_open_;
  const at::Tensor hashes_;
};

inline bool is_rehearsal(const GradientProbe* probe) {
  return probe != nullptr && probe->is_rehearsal();
}

}  // namespace ddp::detail
