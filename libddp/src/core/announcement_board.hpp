// SPDX-License-Identifier: Apache-2.0
// Short texts that ranks announce to each other without waiting.
//
// Captures of a GraphedStep need them: replays exchange nothing, so a rank that replays would never
// notice a rank that waits for it to capture (train/graph/capture_agreement.hpp).
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace ddp::detail {

/// Also implemented by a control plane of several ranks. Any thread.
class AnnouncementBoard {
 public:
  static constexpr std::size_t kMaxAnnouncementBytes = 4096;

  virtual ~AnnouncementBoard() = default;
  /// Replaces this rank's announcement. Cut at kMaxAnnouncementBytes. Arrives some time later, or
  /// never if the job fails.
  virtual void announce(const std::string& text) = 0;
  /// Indexed by rank; empty: none yet.
  virtual std::vector<std::string> announcements() const = 0;
  /// Changes whenever announcements() changes. Takes no lock.
  virtual uint64_t announcements_version() const = 0;
};

/// The newest announcement of each rank. Any thread.
class AnnouncementStore {
 public:
  explicit AnnouncementStore(int world_size)
      : announcements_(static_cast<std::size_t>(world_size)) {}

  void set(int rank, std::string text) {
    const std::lock_guard lock(mutex_);
    announcements_.at(static_cast<std::size_t>(rank)) = std::move(text);
    version_.fetch_add(1, std::memory_order_release);
  }
  std::vector<std::string> get() const {
    const std::lock_guard lock(mutex_);
    return announcements_;
  }
  /// Takes no lock.
  uint64_t version() const { return version_.load(std::memory_order_acquire); }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> announcements_;  // by rank
  std::atomic<uint64_t> version_{0};
};

}  // namespace ddp::detail
