// SPDX-License-Identifier: Apache-2.0
// This rank's step, place and activity, which rank 0 shows if the rank dies silently.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>

#include "core/tcp_socket.hpp"

namespace ddp::detail {

struct Progress {
  int64_t step = -1;
  std::string where;

  friend auto message_fields(Progress& progress) { return std::tie(progress.step, progress.where); }
};

/// Has its own mutex, below which no other is locked: setting the progress never waits for sockets.
/// Any thread.
class ProgressTracker {
 public:
  /// `sender` is notified of progress to send, at most once per `interval`. It is null on rank 0,
  /// which reads its own progress directly.
  ProgressTracker(WakeEvent* sender, std::chrono::milliseconds interval)
      : sender_(sender), interval_(interval) {}

  void set(int64_t step, const std::string& where);
  /// Returns the previous activity.
  std::string set_activity(std::string activity);
  std::string activity() const;
  /// The activity is appended to the place.
  Progress get() const;

  /// When unsent progress may be sent; nothing if all is sent.
  std::optional<SteadyTime> due() const;
  /// Returns unsent progress that is due at `now`. The sender calls this after each wake-up.
  std::optional<Progress> take_due(SteadyTime now);

 private:
  bool mark_unsent();
  Progress current() const;

  WakeEvent* const sender_;
  const std::chrono::milliseconds interval_;
  mutable std::mutex mutex_;
  Progress progress_;
  std::string activity_;
  bool is_unsent_ = false;
  SteadyTime due_{};
};

}  // namespace ddp::detail
