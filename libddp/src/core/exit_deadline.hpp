// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace ddp::detail {

/// Last resort of a failing job. Once armed, the process ends with `exit_code` unless this object
/// is destroyed within `grace`. This bounds destructors that wait for a peer, or for a GPU that
/// waits for a peer.
class ExitDeadline {
 public:
  explicit ExitDeadline(std::chrono::milliseconds grace) : grace_(grace) {}
  ~ExitDeadline();
  ExitDeadline(const ExitDeadline&) = delete;
  ExitDeadline& operator=(const ExitDeadline&) = delete;

  /// Only the first call counts; any thread.
  void arm(int exit_code);

 private:
  void wait(int exit_code);

  const std::chrono::milliseconds grace_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;
};

}  // namespace ddp::detail
