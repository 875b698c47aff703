// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "checks.hpp"
#include "core/control/wire/message_codec.hpp"
#include "core/control/wire/tcp_socket.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/text.hpp"

namespace cluster_check {
namespace {

using Json = nlohmann::ordered_json;

Json number_or_null(const std::optional<double>& value) {
  return value && std::isfinite(*value) ? Json(*value) : Json(nullptr);
}

const char* json_verdict(Verdict verdict) {
  return verdict == Verdict::Fail        ? "fail"
         : verdict == Verdict::Unchecked ? "unchecked"
                                         : to_string(verdict);
}

Json json_of(const Report& report, const Row& row) {
  return {{"group", row.group},
          {"name", row.name},
          {"value", number_or_null(row.value)},
          {"unit", row.unit},
          {"text", row.text},
          {"rank", row.rank},
          {"node", row.rank == kAllRanks
                       ? Json(nullptr)
                       : Json(report.ranks.at(static_cast<std::size_t>(row.rank)).host)},
          {"percent_below_median", number_or_null(row.percent_below_median)},
          {"threshold", row.threshold},
          {"verdict", json_verdict(row.verdict)}};
}

Json json_of(const Report& report, const Line& line) {
  const auto number = [&](double value) {
    return number_or_null(line.num_values > 0 ? std::optional(value) : std::nullopt);
  };
  return {{"group", line.group},
          {"name", line.name},
          {"lowest", number(line.low)},
          {"median", number(line.median)},
          {"highest", number(line.high)},
          {"unit", line.unit},
          {"threshold", line.threshold},
          {"verdict", json_verdict(line.verdict)},
          {"worst", worst_of(report, line)},
          {"text", line.text}};
}

Json json_of(const RankInfo& info) {
  return {{"host", info.host},      {"node_rank", info.node_rank}, {"local_rank", info.local_rank},
          {"device", info.device},  {"gpu", info.gpu_name},        {"launch", info.launch},
          {"backend", info.backend}};
}

/// What a rank sends.
struct RankReport {
  RankInfo info;
  std::vector<Row> rows;
  friend auto message_fields(RankReport& report) { return std::tie(report.info, report.rows); }
};

RankInfo own_info(const Run& run) {
  const auto& context = run.context;
  return {.host = ddp::detail::host_name(),
          .node_rank = context.node_rank(),
          .local_rank = context.local_rank(),
          .device = context.device().str(),
          .gpu_name = run.gpu_name,
          .launch = context.launcher(),
          .backend = context.communicator()->backend()};
}

int badness(Verdict verdict) {
  switch (verdict) {
    case Verdict::Fail:
      return 3;
    case Verdict::Pass:
      return 2;
    case Verdict::Unchecked:
      return 1;
    default:
      return 0;
  }
}

/// Adds `row`'s value; `values` are those of the line so far.
void extend(Line& line, const Row& row, std::vector<double>& values) {
  if (badness(row.verdict) > badness(line.verdict)) {
    line.verdict = row.verdict;
    line.threshold = row.threshold;
  }
  if (!row.value) {
    return;
  }
  values.push_back(*row.value);
  const auto* check = find_check(line.group, line.name);
  const bool high_is_bad = check != nullptr && check->limit == Limit::Max;
  const bool is_worse = line.worst == nullptr || (high_is_bad ? *row.value > *line.worst->value
                                                              : *row.value < *line.worst->value);
  if (is_worse) {
    line.worst = &row;
    line.text = row.text;
  }
}

std::string rank_table(const Report& report) {
  ddp::detail::TextStream out;
  for (std::size_t rank = 0; rank < report.ranks.size(); ++rank) {
    const auto& info = report.ranks[rank];
    out << "rank " << rank << " of " << report.ranks.size() << ": node " << info.node_rank << " ("
        << info.host << "), local rank " << info.local_rank << ", device " << info.device
        << (info.gpu_name.empty() ? "" : " (" + info.gpu_name + ")") << ", communicator "
        << info.backend << ", started by " << info.launch << '\n';
  }
  return out.str();
}

std::string points_table(const Report& report) {
  ddp::detail::TextStream out;
  if (!report.points.empty()) {
    out << "\n"
        << std::left << std::setw(16) << "operation" << std::right << std::setw(12) << "bytes"
        << std::setw(12) << "us" << std::setw(14) << "algbw GB/s" << std::setw(14) << "busbw GB/s"
        << '\n';
  }
  for (const auto& point : report.points) {
    out << std::left << std::setw(16) << point.operation << std::right << std::setw(12)
        << point.bytes << std::setw(12) << format_number(point.microseconds) << std::setw(14)
        << format_number(point.algbw) << std::setw(14) << format_number(point.busbw) << '\n';
  }
  return out.str();
}

std::string pairs_table(const Report& report) {
  constexpr std::size_t kMostRanks = 16;  // wider than a terminal: report.json has all
  ddp::detail::TextStream out;
  if (report.pairs.empty() || report.pairs.size() > kMostRanks) {
    return "";
  }
  out << "\nGB/s from rank (row) to rank (column)\n" << std::setw(6) << "";
  for (std::size_t to = 0; to < report.pairs.size(); ++to) {
    out << std::setw(8) << to;
  }
  out << '\n';
  for (std::size_t from = 0; from < report.pairs.size(); ++from) {
    out << std::setw(6) << from;
    for (std::size_t to = 0; to < report.pairs.size(); ++to) {
      out << std::setw(8) << (from == to ? "-" : format_number(report.pairs[from][to]));
    }
    out << '\n';
  }
  return out.str();
}

}  // namespace

void gather_report(Run& run) {
  const RankReport own{.info = own_info(run), .rows = run.report.rows};
  run.report.rows.clear();
  for (auto& rank : ddp::detail::gather_messages(run.context.control_plane(), own)) {
    run.report.ranks.push_back(std::move(rank.info));
    std::move(rank.rows.begin(), rank.rows.end(), std::back_inserter(run.report.rows));
  }
}

std::vector<Line> lines_of(const Report& report) {
  std::vector<Line> lines;
  std::map<std::pair<std::string, std::string>, std::size_t> index;
  std::vector<std::vector<double>> values;
  for (const auto& row : report.rows) {
    const auto [at, is_new] = index.try_emplace({row.group, row.name}, lines.size());
    if (is_new) {
      lines.push_back({.group = row.group,
                       .name = row.name,
                       .unit = row.unit,
                       .threshold = row.threshold,
                       .text = row.text,
                       .verdict = Verdict::NotAvailable});
      values.emplace_back();
    }
    extend(lines[at->second], row, values[at->second]);
  }
  for (std::size_t i = 0; i < lines.size(); ++i) {
    auto& sorted = values[i];
    if (!sorted.empty()) {
      std::sort(sorted.begin(), sorted.end());
      lines[i].num_values = static_cast<int>(sorted.size());
      lines[i].low = sorted.front();
      lines[i].median = median_of(sorted);
      lines[i].high = sorted.back();
    }
  }
  return lines;
}

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

std::string place_of(const Report& report, int rank) {
  if (rank == kAllRanks) {
    return "all ranks";
  }
  const auto& info = report.ranks.at(static_cast<std::size_t>(rank));
  return ddp::concat("rank ", rank, " (", info.device,
                     info.gpu_name.empty() ? "" : ", " + info.gpu_name, ") on node ", info.host);
}

std::vector<std::string> failures_of(const Report& report) {
  std::vector<std::string> sentences;
  for (const auto& row : report.rows) {
    if (row.verdict != Verdict::Fail) {
      continue;
    }
    std::string sentence =
        ddp::concat(row.group, ".", row.name, " = ", format_number(*row.value),
                    row.unit.empty() ? "" : " " + row.unit, ", must be ", row.threshold);
    sentence += ": " + place_of(report, row.rank);
    if (row.percent_below_median && *row.percent_below_median > 0) {
      sentence +=
          ddp::concat("; ", format_number(*row.percent_below_median), " % below the median");
    }
    sentence += row.text.empty() ? "" : "; " + row.text;
    sentences.push_back(sentence);
  }
  return sentences;
}

std::string verdict_of(const Report& report) {
  const auto num_failures = failures_of(report).size();
  std::string text;
  if (num_failures > 0) {
    text = ddp::concat(num_failures, num_failures == 1 ? " row failed" : " rows failed");
  } else if (report.num_met == 0) {
    text = "no threshold was checked";
  } else {
    text = ddp::concat("all checks passed: ", report.num_met,
                       report.num_met == 1 ? " threshold is met" : " thresholds are met");
  }
  constexpr std::size_t kMostNames = 6;
  const auto& missing = report.not_measured;
  if (missing.size() > kMostNames) {
    return text + ddp::concat("; ", missing.size(), " others were not measured");
  }
  for (std::size_t i = 0; i < missing.size(); ++i) {
    text += (i == 0 ? "; not measured: " : ", ") + missing[i];
  }
  return text;
}

std::string worst_of(const Report& report, const Line& line) {
  if (line.worst == nullptr || line.worst->rank == kAllRanks || line.low == line.high) {
    return "";
  }
  const auto& percent = line.worst->percent_below_median;
  return ddp::concat("rank ", line.worst->rank, " on ",
                     report.ranks.at(static_cast<std::size_t>(line.worst->rank)).host,
                     percent ? ", " + format_number(*percent) + " % below the median" : "");
}

const char* to_string(Verdict verdict) {
  switch (verdict) {
    case Verdict::Pass:
      return "pass";
    case Verdict::Fail:
      return "FAIL";
    case Verdict::NotAvailable:
      return "n/a";
    default:
      return "no limit";
  }
}

std::string format_number(double value) {
  ddp::detail::TextStream out;
  if (std::abs(value) >= 1000) {
    out << std::fixed << std::setprecision(0) << value;
  } else {
    out << std::setprecision(4) << value;
  }
  return out.str();
}

std::string to_table(const Report& report) {
  ddp::detail::TextStream out;
  out << rank_table(report);
  std::string group;
  const bool is_alone = report.ranks.size() == 1;
  const auto row = [&](const auto& name, const auto& low, const auto& median, const auto& high,
                       const auto& unit, const auto& verdict) {
    out << "  " << std::left << std::setw(27) << name << std::right << std::setw(10) << low;
    if (!is_alone) {
      out << std::setw(10) << median << std::setw(10) << high;
    }
    out << ' ' << std::left << std::setw(9) << unit << std::setw(8) << verdict;
  };
  for (const auto& line : lines_of(report)) {
    if (line.group != group) {
      group = line.group;
      out << '\n';
      row(group, is_alone ? "value" : "lowest", "median", "highest", "", "");
      out << '\n';
    }
    const bool known = line.num_values > 0;
    const auto cell = [&](double value) { return known ? format_number(value) : "n/a"; };
    row(line.name, cell(line.low), cell(line.median), cell(line.high), line.unit,
        to_string(line.verdict));
    std::string note = line.threshold;
    const auto join = [&](const std::string& part) {
      note += (note.empty() || part.empty() ? "" : "; ") + part;
    };
    if (const auto worst = worst_of(report, line); !worst.empty()) {
      join("worst: " + worst);
    }
    join(line.text);
    out << ' ' << note << '\n';
  }
  out << points_table(report) << pairs_table(report);
  return out.str();
}

std::string to_json(const Report& report) {
  Json json{{"passed", failures_of(report).empty()},
            {"summary", verdict_of(report)},
            {"started", report.started},
            {"seconds", report.seconds},
            {"quick", report.quick},
            {"thresholds", report.thresholds},
            {"thresholds_met", report.num_met},
            {"thresholds_not_measured", report.not_measured},
            {"nccl_variables", report.nccl},
            {"versions", report.versions},
            {"ranks", Json::array()},
            {"checks", Json::array()},
            {"rows", Json::array()},
            {"collectives", Json::array()},
            {"pairs", {{"bytes", report.pair_bytes}, {"gb_per_s", report.pairs}}},
            {"failures", failures_of(report)}};
  for (const auto& info : report.ranks) {
    json["ranks"].push_back(json_of(info));
  }
  for (const auto& line : lines_of(report)) {
    json["checks"].push_back(json_of(report, line));
  }
  for (const auto& row : report.rows) {
    json["rows"].push_back(json_of(report, row));
  }
  for (const auto& point : report.points) {
    json["collectives"].push_back({{"operation", point.operation},
                                   {"bytes", point.bytes},
                                   {"microseconds", point.microseconds},
                                   {"algbw_gb_per_s", point.algbw},
                                   {"busbw_gb_per_s", point.busbw}});
  }
  // Drivers may name themselves in other bytes than UTF-8.
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace cluster_check
