// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ddp/detail/usage_mark.hpp"

namespace ddp::detail {

/// A number that only the program's own loop can obey. It converts to int64_t, and a conversion
/// notes that the program read it. Where a type is deduced (std::min, a ?: with another number),
/// write int64_t{cfg.train.epochs}.
class LoopLength {
 public:
  LoopLength(int64_t value) : value_(value) {}  // NOLINT: assigned like the number
  operator int64_t() const {                    // NOLINT: read like the number
    mark_.set();
    return value_;
  }

  /// For libddp itself: the settings' reader, tables and checks. Does not count as read.
  int64_t& unmarked() { return value_; }
  int64_t unmarked() const { return value_; }
  /// Notes reads from now on, also those of copies.
  UsageMark watch() { return mark_ = UsageMark::make(); }

 private:
  int64_t value_;
  UsageMark mark_{};
};

}  // namespace ddp::detail
