// SPDX-License-Identifier: Apache-2.0
// Detects deadlocks from the positions that ranks report, never by guessing. A rank that may still
// continue by itself (it saves, loads, computes, waits for the device) is never blamed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/rank_position.hpp"

namespace ddp::detail {

/// The last control-plane collective a rank called, while incomplete.
struct PlaneCall {
  uint64_t sequence = 0;
  std::string name;     ///< "all_gather of metrics"
  bool leaves = false;  ///< the rank is ending: no collective of a communicator follows
};

struct RankView {
  std::string host;
  std::optional<PlaneCall> call;
  uint64_t num_calls = 0;                ///< control-plane calls, including `call`
  std::optional<RankPosition> position;  ///< the last one reported; may be stale
};

/// Returns an empty string if no deadlock is certain, else both sides of the deadlock. Every
/// verdict holds for stale positions too:
/// - A rank in a control-plane call (close() included) stays there until that call completes.
///   So the number of its collectives has not changed since its report.
/// - A collective that one rank of the group has not called cannot complete on the others.
/// - A rank that waits for a collective cannot call the control plane if one thread makes all
///   calls.
/// - Different operations with one number are always a mistake.
std::string find_deadlock(const std::vector<RankView>& ranks);

}  // namespace ddp::detail
