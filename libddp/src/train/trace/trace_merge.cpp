// SPDX-License-Identifier: Apache-2.0
#include "train/trace/trace_merge.hpp"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/control/wire/message_codec.hpp"
#include "core/log/trace_recorder.hpp"

namespace ddp {

auto message_fields(TraceEvent& event) {
  return std::tie(event.name, event.track, event.begin_ns, event.end_ns, event.step);
}

namespace detail {
namespace {

using Json = nlohmann::json;
constexpr std::size_t kPartBytes = 512 << 10;

// Greedy: the first line whose last open span contains the span or ended before it.
class Lanes {
 public:
  std::size_t place(const TraceEvent& event) {
    for (std::size_t lane = 0; lane < open_.size(); ++lane) {
      auto& stack = open_[lane];
      while (!stack.empty() && stack.back() <= event.begin_ns) {
        stack.pop_back();
      }
      if (stack.empty() || stack.back() >= event.end_ns) {
        stack.push_back(event.end_ns);
        return lane;
      }
    }
    open_.push_back({event.end_ns});
    return open_.size() - 1;
  }

 private:
  std::vector<std::vector<int64_t>> open_;  ///< ends of the enclosing spans, by lane
};

Json name_event(const char* what, std::size_t pid, std::size_t tid, const std::string& name) {
  return {{"ph", "M"}, {"name", what}, {"pid", pid}, {"tid", tid}, {"args", {{"name", name}}}};
}

void add_rank(Json& list, std::size_t rank, std::vector<TraceEvent> events, int64_t shift_ns) {
  list.push_back(name_event("process_name", rank, 0, "rank " + std::to_string(rank)));
  // Outer spans first, so that inner spans nest in them.
  std::stable_sort(events.begin(), events.end(), [](const TraceEvent& a, const TraceEvent& b) {
    return a.begin_ns != b.begin_ns ? a.begin_ns < b.begin_ns : a.end_ns > b.end_ns;
  });
  std::map<std::string, Lanes> lanes;
  std::map<std::pair<std::string, std::size_t>, std::size_t> lines;
  for (const auto& event : events) {
    const auto lane = lanes[event.track].place(event);
    const auto [line, fresh] = lines.try_emplace({event.track, lane}, lines.size());
    if (fresh) {
      list.push_back(name_event("thread_name", rank, line->second,
                                event.track + (lane > 0 ? " " + std::to_string(lane + 1) : "")));
    }
    list.push_back({{"ph", "X"},
                    {"name", event.name},
                    {"cat", event.track},
                    {"pid", rank},
                    {"tid", line->second},
                    {"ts", static_cast<double>(event.begin_ns - shift_ns) / 1e3},
                    {"dur", static_cast<double>(event.end_ns - event.begin_ns) / 1e3},
                    {"args", {{"step", event.step}}}});
  }
}

}  // namespace

ClockOffset estimate_clock_offset(const std::vector<ClockRound>& rounds) {
  if (rounds.empty()) {
    return {};
  }
  int64_t high = INT64_MAX;
  int64_t low = INT64_MIN;
  for (const auto& round : rounds) {
    high = std::min(high, round.received - round.sent);
    low = std::max(low, round.answered - round.gathered);
  }
  return {.offset_ns = low + (high - low) / 2, .error_ns = std::abs(high - low) / 2};
}

ClockOffset measure_clock_offset(ControlPlane& control_plane, int num_rounds) {
  if (control_plane.world_size() == 1) {
    return {};
  }
  std::vector<ClockRound> rounds;
  for (int i = 0; i < num_rounds; ++i) {
    ClockRound round;
    round.sent = broadcast_message(control_plane, TraceRecorder::now_ns());
    round.received = TraceRecorder::now_ns();
    round.answered = TraceRecorder::now_ns();
    control_plane.barrier();
    // Known to rank 0 only; it travels with one more broadcast.
    round.gathered = broadcast_message(control_plane, TraceRecorder::now_ns());
    rounds.push_back(round);
  }
  return control_plane.rank() == 0 ? ClockOffset{} : estimate_clock_offset(rounds);
}

std::vector<std::vector<TraceEvent>> gather_events(ControlPlane& control_plane,
                                                   const std::vector<TraceEvent>& events) {
  const auto text = encode_message(events);
  std::size_t longest = 0;
  for (const std::size_t size : all_gather_messages(control_plane, text.size())) {
    longest = std::max(longest, size);
  }
  std::vector<std::string> received(static_cast<std::size_t>(control_plane.world_size()));
  for (std::size_t offset = 0; offset < longest; offset += kPartBytes) {
    const auto parts =
        control_plane.gather(offset < text.size() ? text.substr(offset, kPartBytes) : "");
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      received[rank] += parts[rank];
    }
  }
  return control_plane.rank() == 0 ? decode_messages<std::vector<TraceEvent>>(received)
                                   : std::vector<std::vector<TraceEvent>>();
}

std::string trace_to_json(const std::vector<std::vector<TraceEvent>>& events_by_rank,
                          const std::vector<ClockOffset>& offsets) {
  int64_t first = INT64_MAX;
  for (std::size_t rank = 0; rank < events_by_rank.size(); ++rank) {
    for (const auto& event : events_by_rank[rank]) {
      first = std::min(first, event.begin_ns - offsets[rank].offset_ns);
    }
  }
  Json list = Json::array();
  Json errors = Json::array();
  for (std::size_t rank = 0; rank < events_by_rank.size(); ++rank) {
    add_rank(list, rank, events_by_rank[rank], first + offsets[rank].offset_ns);
    errors.push_back(static_cast<double>(offsets[rank].error_ns) / 1e3);
  }
  return Json{{"traceEvents", std::move(list)},
              {"displayTimeUnit", "ms"},
              {"otherData", {{"clock_error_us_by_rank", errors}}}}
      .dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace detail
}  // namespace ddp
