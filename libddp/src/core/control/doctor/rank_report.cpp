// SPDX-License-Identifier: Apache-2.0
#include "core/control/doctor/rank_report.hpp"

#include <algorithm>

#include "core/control/wire/message_codec.hpp"

namespace ddp::detail {
namespace {

// Keeps the newest entries, at most `budget`, and reduces it by their number.
void shorten(std::vector<CollectiveEntry>& entries, std::size_t& budget) {
  const auto kept = std::min({entries.size(), kMaxHistoryEntries, budget});
  entries.erase(entries.begin(), entries.end() - static_cast<std::ptrdiff_t>(kept));
  budget -= kept;
  for (auto& entry : entries) {
    for (auto* text : {&entry.operation, &entry.label, &entry.dtype}) {
      text->resize(std::min(text->size(), kMaxEntryBytes));
    }
  }
}

}  // namespace

const char* to_string(CollectiveState state) {
  switch (state) {
    case CollectiveState::Called:
      return "called";
    case CollectiveState::Enqueued:
      return "enqueued";
    case CollectiveState::Started:
      return "started";
    case CollectiveState::Ended:
      return "ended";
    case CollectiveState::Failed:
      return "failed";
  }
  return "?";
}

std::string encode_report(RankReport report) {
  cut_to_limits(report.position);
  report.histories.resize(report.position.groups.size());
  std::size_t budget = kMaxReportEntries;
  for (auto& history : report.histories) {
    shorten(history.collectives, budget);
    history.graphs.resize(std::min(history.graphs.size(), kMaxHistoryGraphs));
    for (auto& graph : history.graphs) {
      shorten(graph.nodes, budget);
    }
  }
  return encode_message(report);
}

}  // namespace ddp::detail
