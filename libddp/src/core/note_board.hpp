// SPDX-License-Identifier: Apache-2.0
// Short texts that ranks leave for each other, and nobody waits for: what a rank that is about to
// wait in a collective would like the others to know, should they not come.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddp::detail {

/// What a control plane of several ranks is too. Any thread.
class NoteBoard {
 public:
  static constexpr std::size_t kMaxNoteBytes = 4096;

  virtual ~NoteBoard() = default;
  /// Replaces this rank's note. Cut at kMaxNoteBytes; arrives some time later, or never where the
  /// job fails.
  virtual void post_note(const std::string& text) = 0;
  /// By rank; empty: none yet.
  virtual std::vector<std::string> notes() const = 0;
  /// Changes when notes() does. Takes no lock.
  virtual uint64_t notes_version() const = 0;
};

}  // namespace ddp::detail
