// SPDX-License-Identifier: Apache-2.0
// Short texts that ranks post for each other without waiting. A rank about to wait in a collective
// posts a note for ranks that may not come.
#pragma once

#include <cstdint>
#include <string>
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

}  // namespace ddp::detail
