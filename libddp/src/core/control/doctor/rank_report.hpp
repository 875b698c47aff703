// SPDX-License-Identifier: Apache-2.0
// A rank's answer when rank 0 asks all ranks for a report.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "core/control/group_history.hpp"
#include "core/control/rank_position.hpp"

namespace ddp::detail {

/// Collectives in one report, of all communicators and graphs together.
inline constexpr std::size_t kMaxReportEntries = 256;

struct RankReport {
  RankPosition position;
  /// See CpuLoad, in the last half second: a rank that computes on the CPU has about 100.
  uint32_t cpu_percent = 0;
  std::vector<GroupHistory> histories = {};  ///< of `position.groups`, in the same order

  bool is_valid() const { return histories.size() == position.groups.size(); }
  bool operator==(const RankReport&) const = default;
  friend auto message_fields(RankReport& report) {
    return std::tie(report.position, report.cpu_percent, report.histories);
  }
};

/// Cuts what exceeds the limits. Each list of collectives keeps its first pending one, some before
/// it, and the newest. All lists share kMaxReportEntries; those with pending collectives come
/// first.
void cut_to_limits(RankReport& report);
/// The message of `report` within the limits.
std::string encode_report(RankReport report);

}  // namespace ddp::detail
