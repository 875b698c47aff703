// SPDX-License-Identifier: Apache-2.0
// The scalars of one step, which the host reads after the device has finished the step.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

namespace ddp {

namespace detail {
class StepRing;
}

/// The one-element results of a GraphedStep's step, in the order of for_each_tensor. Cheap to copy.
/// Readable until 2 * kMaxStepsAhead later steps have run; then its slot is reused, and operator[]
/// throws InternalError.
class StepLog {
 public:
  static constexpr int kMaxScalars = 16;
  /// A GraphedStep's call waits while more steps than this are in flight.
  static constexpr int kMaxStepsAhead = 64;

  StepLog() = default;

  int size() const { return size_; }
  /// Whether the device has finished the step. Never waits, makes no CUDA call.
  bool is_ready() const;
  /// The number. The *host* waits until the step has finished. Throws PeerLostError if a rank of
  /// the job failed meanwhile.
  double operator[](int index) const;

 private:
  friend class detail::StepRing;

  std::shared_ptr<const detail::StepRing> ring_;  // null: `values_` holds the numbers
  uint64_t sequence_ = 0;
  int size_ = 0;
  std::array<double, kMaxScalars> values_{};
};

}  // namespace ddp
