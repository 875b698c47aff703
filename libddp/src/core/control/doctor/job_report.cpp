// SPDX-License-Identifier: Apache-2.0
#include "core/control/doctor/job_report.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <nlohmann/json.hpp>

#include "core/control/doctor/group_members.hpp"
#include "core/control/failure/failure_cause.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/files.hpp"

namespace ddp::detail {
namespace {

using Json = nlohmann::ordered_json;

// Ranks in the log of a report without a file.
constexpr std::size_t kLoggedRanks = 16;

struct ReportFile {
  std::mutex mutex;
  std::string path;
};
ReportFile& report_file() {
  static auto* instance = new ReportFile;  // leaked: the control plane's thread may outlive statics
  return *instance;
}

std::string path_of_file() {
  if (const char* path = std::getenv("DDP_DOCTOR_FILE")) {
    return path;
  }
  const std::lock_guard lock(report_file().mutex);
  return report_file().path;
}

void add_age(Json& json, const char* name, int64_t age) {
  if (age != kUnknownAge) {
    json[name] = age;
  }
}

Json entry_json(const CollectiveEntry& entry) {
  Json json{{"number", entry.number}, {"operation", entry.operation}};
  if (!entry.label.empty()) {
    json["label"] = entry.label;
  }
  if (!entry.dtype.empty()) {
    json["dtype"] = entry.dtype;
    json["bytes"] = entry.num_bytes;
  }
  json["state"] = to_string(entry.state);
  add_age(json, "enqueued_ms", entry.enqueued_ms);
  add_age(json, "started_ms", entry.started_ms);
  add_age(json, "ended_ms", entry.ended_ms);
  return json;
}

Json entries_json(const std::vector<CollectiveEntry>& entries) {
  auto json = Json::array();
  for (const auto& entry : entries) {
    json.push_back(entry_json(entry));
  }
  return json;
}

Json group_json(const GroupPosition& group, const GroupHistory& history) {
  Json json{{"communicator", group.id}};
  if (group.num_called != std::numeric_limits<uint64_t>::max()) {
    json["called"] = group.num_called;
  }
  json["pending"] = group.pending;
  json["collectives"] = entries_json(history.collectives);
  json["graphs"] = Json::array();
  for (const auto& graph : history.graphs) {
    Json replayed{{"graph", graph.graph},
                  {"replays", graph.num_replays},
                  {"ended", graph.num_ended},
                  {"collectives", entries_json(graph.nodes)}};
    add_age(replayed, "waited_ms", graph.waited_ms);
    json["graphs"].push_back(std::move(replayed));
  }
  return json;
}

Json rank_json(int rank, const RankEvidence& evidence) {
  const auto& report = evidence.report;
  const auto& step = report ? report->position.step : evidence.last.step;
  const auto& where = report ? report->position.where : evidence.last.where;
  Json json{{"rank", rank},
            {"host", evidence.host},
            {"process", evidence.process},
            {"connected", evidence.is_connected},
            {"answered", report.has_value()},
            {"silent_ms", evidence.silence.count()},
            {"step", step},
            {"where", where}};
  if (evidence.process_state != 0) {
    json["process_state"] = std::string(1, evidence.process_state);
  }
  if (evidence.call) {
    json["control_plane_call"] = evidence.call->name;
  }
  if (report) {
    json["cpu_percent"] = report->cpu_percent;
    json["communicators"] = Json::array();
    for (std::size_t i = 0; i < report->position.groups.size(); ++i) {
      json["communicators"].push_back(group_json(report->position.groups[i], report->histories[i]));
    }
  }
  return json;
}

// "rank 2 (node1) is at step 5 in backward; world: 811 called, in all_reduce #812 (…) since 31 s"
std::string rank_line(int rank, const RankEvidence& evidence) {
  const auto& report = evidence.report;
  auto line = rank_words(rank, evidence.host);
  if (!report) {
    return concat(line, " did not answer; last seen ", seconds_words(evidence.silence.count()),
                  " ago", place_words(evidence.last.step, evidence.last.where));
  }
  const auto& position = report->position;
  line += " is" + place_words(position.step, position.where);
  for (std::size_t i = 0; i < position.groups.size(); ++i) {
    const auto& group = position.groups[i];
    const GroupMember member(rank, group, report->histories[i], evidence.waited,
                             std::chrono::milliseconds(0));
    line += concat("; ", group.id, ": ", member.num_called, " called");
    if (member.pending) {
      line += concat(", in ", member.pending->words(), " since ",
                     seconds_words(member.pending->waited_ms));
    }
  }
  return line;
}

// Whether the verdict says more than the first cause. That of a deadlock (without a rank) names
// both sides, if not an earlier call that led to it. The errors of programs and the loss of a rank
// speak for themselves.
bool adds_to_cause(const JobReport& report) {
  const auto& cause = *report.cause;
  const auto& ranks = report.verdict.ranks;
  switch (report.verdict.kind) {
    case VerdictKind::NothingCertain:
    case VerdictKind::Lost:
      return false;
    case VerdictKind::Stopped:
      return report.verdict.text != cause.to_line();
    case VerdictKind::OtherOperation:
    case VerdictKind::OtherSize:
    case VerdictKind::OtherOrder:
    case VerdictKind::OtherGraph:
      return cause.rank < 0
                 ? !report.verdict.is_certain
                 : cause.exit_code == ExitCode::PeerLost || cause.exit_code == ExitCode::Mismatch;
    default:
      return cause.exit_code == ExitCode::PeerLost &&
             std::find(ranks.begin(), ranks.end(), cause.rank) == ranks.end();
  }
}

}  // namespace

void set_report_file(const std::string& path) {
  const std::lock_guard lock(report_file().mutex);
  report_file().path = path;
}

std::string to_json(const JobReport& report) {
  const auto& verdict = report.verdict;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  Json json{{"time", std::chrono::duration_cast<std::chrono::duration<double>>(now).count()},
            {"reason", report.cause ? "failure" : "request"},
            {"verdict",
             {{"kind", to_string(verdict.kind)},
              {"certain", verdict.is_certain},
              {"ranks", verdict.ranks},
              {"text", verdict.text}}}};
  if (report.cause) {
    json["first_cause"] = report.cause->to_line();
  }
  json["ranks"] = Json::array();
  for (std::size_t rank = 0; rank < report.evidence.size(); ++rank) {
    json["ranks"].push_back(rank_json(static_cast<int>(rank), report.evidence[rank]));
  }
  return json.dump(1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

void publish_report(const JobReport& report) {
  if (!report.cause) {
    log_warning("doctor: " + report.verdict.text);
  } else if (adds_to_cause(report)) {
    log_error("doctor: " + report.verdict.text);
  }
  if (const auto path = path_of_file(); !path.empty()) {
    replace_file(system_file_ops(), path, {to_json(report) + "\n"}, Durability::Cached);
    log_info(concat("report of all ranks: ", path));
    return;
  }
  const auto num_logged = report.cause ? 0 : std::min(report.evidence.size(), kLoggedRanks);
  for (std::size_t rank = 0; rank < num_logged; ++rank) {
    log_info(rank_line(static_cast<int>(rank), report.evidence[rank]));
  }
}

}  // namespace ddp::detail
