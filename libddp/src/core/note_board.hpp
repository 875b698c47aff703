// SPDX-License-Identifier: Apache-2.0
// Short texts that ranks post for each other without waiting. A rank about to wait in a collective
// posts a note for ranks that may not come.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace ddp::detail {

/// Also implemented by a control plane of several ranks. Any thread.
class NoteBoard {
 public:
  static constexpr std::size_t kMaxNoteBytes = 4096;

  virtual ~NoteBoard() = default;
  /// Replaces this rank's note. Cut at kMaxNoteBytes. Arrives some time later, or never if the job
  /// fails.
  virtual void post_note(const std::string& text) = 0;
  /// Indexed by rank; empty: no note yet.
  virtual std::vector<std::string> notes() const = 0;
  /// Changes whenever notes() changes. Takes no lock.
  virtual uint64_t notes_version() const = 0;
};

/// The newest note of each rank. Any thread.
class NoteStore {
 public:
  explicit NoteStore(int world_size) : notes_(static_cast<std::size_t>(world_size)) {}

  void set(int rank, std::string text) {
    const std::lock_guard lock(mutex_);
    notes_.at(static_cast<std::size_t>(rank)) = std::move(text);
    version_.fetch_add(1, std::memory_order_release);
  }
  std::vector<std::string> get() const {
    const std::lock_guard lock(mutex_);
    return notes_;
  }
  /// Takes no lock.
  uint64_t version() const { return version_.load(std::memory_order_acquire); }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> notes_;  // by rank
  std::atomic<uint64_t> version_{0};
};

}  // namespace ddp::detail
