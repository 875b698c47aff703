// SPDX-License-Identifier: Apache-2.0
// Which communicator's GroupScope is open in this thread. NCCL's groups are the thread's: it holds
// back what any communicator is given in one, so that another communicator's work would end its
// wait before it was launched. All backends refuse it, so that a program that runs on the CPU runs
// on GPUs.
#pragma once

#include "ddp/core/error.hpp"

namespace ddp::detail {

class ThreadGroup {
 public:
  /// Throws SettingsError where a GroupScope of another communicator is open in this thread.
  static void check(const void* communicator, const char* operation) {
    if (depth_ > 0 && communicator_ != communicator) [[unlikely]] {
      throw SettingsError(concat(operation,
                                 ": a GroupScope of another communicator is open in this thread; "
                                 "end that scope first, or use this communicator before it"));
    }
  }
  static void enter(const void* communicator) {
    check(communicator, "group_start");
    communicator_ = communicator;
    ++depth_;
  }
  static void leave() { --depth_; }

 private:
  static inline thread_local const void* communicator_ = nullptr;
  static inline thread_local int depth_ = 0;
};

}  // namespace ddp::detail
