// SPDX-License-Identifier: Apache-2.0
// The numbers of one step, which the host reads after the device has finished the step.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

namespace ddp {

namespace detail {
class StepRing;
}

/// A number that a step logged, or none if default-constructed. It is cheap to copy. Its memory is
/// reused after 2 * StepLog::kMaxStepsAhead later steps.
class LoggedScalar {
 public:
  LoggedScalar() = default;

  bool has_value() const { return index_ >= 0; }  ///< false if default-constructed
  bool is_ready() const;                          ///< as StepLog::is_ready()
  /// The *host* waits until the step has finished. Throws PeerLostError if a rank of the job failed
  /// meanwhile, SettingsError if there is no number or its memory was reused.
  double value() const;
  operator double() const { return value(); }  // NOLINT(google-explicit-constructor)

 private:
  friend class StepLog;

  std::shared_ptr<const detail::StepRing> ring_;  // null: `value_` is the number
  uint64_t sequence_ = 0;
  int index_ = -1;
  double value_ = 0;
};

/// The one-element results of a GraphedStep's step, in the order of for_each_tensor. Cheap to copy.
class StepLog {
 public:
  static constexpr int kMaxScalars = 16;  ///< of one step
  /// A GraphedStep's call waits while more steps than this are in flight.
  static constexpr int kMaxStepsAhead = 64;

  StepLog() = default;

  int size() const { return size_; }  ///< numbers of this step
  bool is_ready() const;  ///< whether the step has finished; never waits, makes no CUDA call
  LoggedScalar operator[](int index) const;  ///< throws SettingsError if out of range

 private:
  friend class detail::StepRing;

  std::shared_ptr<const detail::StepRing> ring_;  // null: `values_` holds the numbers
  uint64_t sequence_ = 0;
  int size_ = 0;
  std::array<double, kMaxScalars> values_{};
};

}  // namespace ddp
