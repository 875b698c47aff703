// SPDX-License-Identifier: Apache-2.0
// The communicator whose GroupScope is open in this thread. An open group of NCCL defers the calls
// of every communicator in its thread. So a wait for another communicator's work could end before
// that work was launched. All backends refuse such calls: a program that runs on CPU also runs on
// GPUs.
#pragma once

#include "ddp/core/error.hpp"

namespace ddp::detail {

class ThreadGroup {
 public:
  /// Throws SettingsError if another communicator's GroupScope is open in this thread.
  static void check(const void* communicator, const char* operation) {
    if (depth_ > 0 && communicator_ != communicator) [[unlikely]] {
      throw SettingsError(concat(operation,
                                 ": a GroupScope of another communicator is open in this thread; "
                                 "fix: end that scope first, or use this communicator before it"));
    }
  }
  static bool is_open() { return depth_ > 0; }
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
