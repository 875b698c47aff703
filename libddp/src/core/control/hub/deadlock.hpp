// SPDX-License-Identifier: Apache-2.0
// Detects deadlocks from the positions that ranks report, never by guessing. A rank that may still
// continue by itself (it saves, loads, computes, waits for the device) is never blamed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/control/rank_position.hpp"

namespace ddp::detail {

/// The last control-plane collective a rank called, while incomplete.
struct PlaneCall {
  uint64_t sequence = 0;
  std::string name;     ///< "all_gather of metrics"
  bool leaves = false;  ///< the rank is ending: no collective of a communicator follows
  /// The program's own barrier(). A thread that calls it may wait for other threads' collectives.
  bool is_own_barrier = false;
};

/// What rank 0 knows of a rank.
struct RankSnapshot {
  std::string host;
  std::optional<PlaneCall> call;
  uint64_t num_calls = 0;                ///< control-plane calls, including `call`
  std::optional<RankPosition> position;  ///< the last one reported; may be stale
};

struct Deadlock {
  std::string text = {};        ///< both sides
  std::vector<int> ranks = {};  ///< that the other side waits for, or that differ
  std::string group = {};       ///< id of the communicator
};

/// Returns a deadlock, or one without text if none is certain. The result also holds for stale
/// positions:
/// - A rank in a control-plane call (close() included) stays there until that call completes.
///   So the number of its collectives has not changed since its report.
/// - A collective that one rank of the group has not called cannot complete on the ranks that
///   receive from it.
/// - A rank that waits for a collective cannot call the control plane if one thread makes all
///   calls, and a rank in a control-plane call cannot call a collective. A thread that has made no
///   call yet is unknown. So the program's own barrier(), in which a thread often waits for
///   others, is no proof, nor is a communicator that the rank has not used yet.
/// - Different operations with one number are always an error.
Deadlock prove_deadlock(const std::vector<RankSnapshot>& ranks);
/// Its text.
std::string find_deadlock(const std::vector<RankSnapshot>& ranks);

}  // namespace ddp::detail
