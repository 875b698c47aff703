// SPDX-License-Identifier: Apache-2.0
// The communicator whose GroupScope is open in this thread. NCCL's groups belong to the thread: an
// open group defers the calls of every communicator. A wait for another communicator's work could
// then end before that work was launched. All backends refuse such calls, so a program that runs on
// CPU also runs on GPUs.
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
