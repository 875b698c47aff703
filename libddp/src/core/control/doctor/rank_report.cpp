// SPDX-License-Identifier: Apache-2.0
#include "core/control/doctor/rank_report.hpp"

#include <algorithm>
#include <utility>

#include "core/control/wire/control_channel.hpp"
#include "core/control/wire/message_codec.hpp"

namespace ddp::detail {
namespace {

using Entries = std::vector<CollectiveEntry>;

// Collectives before the first pending one, and this one: what a list keeps at least.
constexpr std::size_t kNumFirst = 8;

Entries::iterator find_pending(Entries& entries) {
  return std::find_if(entries.begin(), entries.end(),
                      [](const auto& entry) { return entry.is_pending(); });
}
bool has_pending(Entries& entries) {
  return find_pending(entries) != entries.end();
}

// Keeps `limit` entries: the first pending one with some before it, and the newest.
void shorten(Entries& entries, std::size_t limit) {
  if (entries.size() <= limit) {
    return;
  }
  const auto num_first = std::min(kNumFirst, (limit + 1) / 2);
  const auto pending = find_pending(entries);
  const auto end_of_first = static_cast<std::size_t>(pending - entries.begin()) + 1;
  if (pending == entries.end() || end_of_first >= entries.size() - limit + num_first) {
    entries.erase(entries.begin(), entries.end() - static_cast<std::ptrdiff_t>(limit));
    return;  // the newest have it
  }
  const auto num_kept = static_cast<std::ptrdiff_t>(std::min(end_of_first, num_first));
  Entries kept(pending + 1 - num_kept, pending + 1);
  kept.insert(kept.end(), entries.end() - (static_cast<std::ptrdiff_t>(limit) - num_kept),
              entries.end());
  entries = std::move(kept);
}

void shorten_all(std::vector<Entries*> lists) {
  std::erase_if(lists, [](const auto* entries) { return entries->empty(); });
  std::sort(lists.begin(), lists.end(), [](auto* a, auto* b) {
    return std::pair(!has_pending(*a), a->size()) < std::pair(!has_pending(*b), b->size());
  });
  std::size_t budget = kMaxReportEntries;
  for (std::size_t i = 0; i < lists.size(); ++i) {
    auto& entries = *lists[i];
    const auto share =
        std::max(budget / (lists.size() - i), has_pending(entries) ? kNumFirst : std::size_t{0});
    shorten(entries, std::min({share, kMaxHistoryEntries, budget}));
    budget -= entries.size();
    for (auto& entry : entries) {
      for (auto* text : {&entry.operation, &entry.label, &entry.dtype}) {
        cut_text(*text, kMaxEntryBytes);
      }
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

void cut_to_limits(RankReport& report) {
  cut_to_limits(report.position);
  auto& histories = report.histories;
  histories.resize(report.position.groups.size());
  std::vector<Entries*> lists;
  for (auto& history : histories) {
    lists.push_back(&history.collectives);
    auto& graphs = history.graphs;
    std::stable_partition(graphs.begin(), graphs.end(),
                          [](const auto& graph) { return graph.is_pending(); });
    graphs.resize(
        std::min(graphs.size(), std::max<std::size_t>(1, kMaxHistoryGraphs / histories.size())));
    for (auto& graph : graphs) {
      lists.push_back(&graph.nodes);
    }
  }
  shorten_all(std::move(lists));
}

std::string encode_report(RankReport report) {
  cut_to_limits(report);
  auto message = encode_message(report);
  if (message.size() > kMaxPayloadBytes) {  // a report must not fail
    report.position.groups.clear();
    report.histories.clear();
    message = encode_message(report);
  }
  return message;
}

}  // namespace ddp::detail
