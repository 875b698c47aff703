// SPDX-License-Identifier: Apache-2.0
// The scalars of one step, for a host that reads them when the device has come that far.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

namespace ddp {

namespace detail {
class StepRing;
}

/// What a GraphedStep's step returned of one element each, in the order for_each_tensor visits
/// them. Cheap to copy. It can be read until 2 * kMaxStepsAhead later steps have been run; from
/// then on the place is used again, and operator[] throws InternalError.
class StepLog {
 public:
  static constexpr int kMaxScalars = 16;
  /// A GraphedStep's call waits while more steps than this are enqueued and not yet done.
  static constexpr int kMaxStepsAhead = 64;

  StepLog() = default;

  int size() const { return size_; }
  /// Whether the device has ended the step. Never waits, makes no CUDA call.
  bool is_ready() const;
  /// The number. The *host* waits until the step has ended. Throws PeerLostError where a rank of
  /// the job failed meanwhile.
  double operator[](int index) const;

 private:
  friend class detail::StepRing;

  std::shared_ptr<const detail::StepRing> ring_;  // null: `values_` holds them
  uint64_t sequence_ = 0;
  int size_ = 0;
  std::array<double, kMaxScalars> values_{};
};

}  // namespace ddp
