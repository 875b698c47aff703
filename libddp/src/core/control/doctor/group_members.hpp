// SPDX-License-Identifier: Apache-2.0
// The ranks of one communicator, as their reports show them: what each called and waits in.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/control/doctor/rank_report.hpp"

namespace ddp::detail {

/// A collective that a rank has called.
struct ReportedCall {
  uint64_t number = 0;
  std::string operation;
  std::string label;
  bool has_ended = false;
  bool is_pending = false;
  /// The first collective that it may be in fact: one mark of NCCL covers several.
  uint64_t first = 0;
  int64_t waited_ms = 0;
  /// In a replayed CUDA graph: (graph, replay).
  std::optional<std::pair<uint64_t, uint64_t>> replay = {};

  /// "all_reduce #812 (sum of 8 Float, 32 bytes; bucket 4: …)"
  std::string words() const;
  /// Equal on ranks whose calls fit.
  bool fits(const ReportedCall& other) const {
    return operation == other.operation && label == other.label;
  }
};

enum class Entered { No, Yes, Unknown };

/// A rank in one communicator.
struct GroupMember {
  int rank = 0;
  uint64_t num_called = 0;  ///< eager collectives
  /// Ranks number eager collectives equally. They do not once collectives were captured, because
  /// each rank decides by itself which steps it replays.
  bool is_counted = true;
  uint64_t num_replayed = 0;               ///< see GroupHistory
  std::map<uint64_t, ReportedCall> calls;  ///< recent eager ones, by number
  struct Replays {
    uint64_t started = 0;
    uint64_t num_ended = 0;  ///< collectives
  };
  std::map<uint64_t, Replays> replays;  ///< of recent graphs
  std::optional<ReportedCall> pending;  ///< the first that has not ended

  /// `waited`: how long the rank waits as far as rank 0 knows. Calls that wait for less than
  /// `min_wait` do not count as pending.
  GroupMember(int rank, const GroupPosition& position, const GroupHistory& history,
              std::chrono::milliseconds waited, std::chrono::milliseconds min_wait);

  /// Whether the rank has called what `waiting` waits in. Known if both have equal counts of the
  /// other collectives, or wait in calls that fit.
  Entered entered(const GroupMember& waiting) const;
  /// Whether it has ended what `waiting` waits in, for certain.
  bool has_ended(const GroupMember& waiting) const;
  /// Whether it may have ended what `waiting` waits in, and waits in a later collective.
  bool may_have_passed(const GroupMember& waiting) const;
  /// Its eager call of this number; null if not known.
  const ReportedCall* find_call(uint64_t number) const;
  /// Whether it called what fits `call` with another number than `number`, at most a few away.
  bool calls_elsewhere(const ReportedCall& call, uint64_t number) const;
  /// Where numbers tell nothing: in a call that fits.
  bool waits_in(const ReportedCall& call) const;
};

using GroupMembers = std::vector<GroupMember>;

/// The member that waits in the earliest collective; null if none waits.
const GroupMember* find_earliest(const GroupMembers& members);

/// "31 s", "2.4 s"
std::string seconds_words(int64_t milliseconds);
/// "rank 3", "ranks 0-2, 5"
std::string rank_words(const std::vector<int>& ranks);

}  // namespace ddp::detail
