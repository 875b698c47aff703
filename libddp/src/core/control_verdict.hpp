// SPDX-License-Identifier: Apache-2.0
// Who waits for whom for ever: told from what the ranks say, never guessed. A rank that may still
// go on by itself (it saves, loads, computes, waits for the device) is never judged.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/rank_position.hpp"

namespace ddp::detail {

/// The control plane's collective that a rank called last, where it is not complete.
struct PlaneCall {
  uint64_t sequence = 0;
  std::string name;     ///< "all_gather of metrics"
  bool leaves = false;  ///< it ends: no collective of a communicator follows
};

struct RankView {
  std::string host;
  std::optional<PlaneCall> call;
  uint64_t num_calls = 0;                ///< of the control plane, `call` the last
  std::optional<RankPosition> position;  ///< the last one told; it may be old
};

/// Empty: nothing is certain. Else who waits for whom, both named. Why each verdict holds also for
/// old positions:
/// - A rank that left, or stands in a call of the control plane, is there until that call is
///   complete, so its number of collectives cannot have changed since it told it from there.
/// - A collective that one rank of the group has not called cannot end on the others.
/// - A rank that waits for one cannot call the control plane meanwhile, where one thread does both.
/// - Different operations with one number are a mistake whatever follows.
std::string find_deadlock(const std::vector<RankView>& ranks);

}  // namespace ddp::detail
