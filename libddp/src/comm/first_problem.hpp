// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>

namespace ddp::detail {

/// Runs all of several actions although some throw, and then passes on the first exception.
class FirstProblem {
 public:
  template <typename Action>
  void attempt(const Action& action) {
    try {
      action();
    } catch (...) {
      first_ = first_ ? first_ : std::current_exception();
    }
  }
  void rethrow() const {
    if (first_) {
      std::rethrow_exception(first_);
    }
  }

 private:
  std::exception_ptr first_;
};

}  // namespace ddp::detail
