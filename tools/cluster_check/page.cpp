// SPDX-License-Identifier: Apache-2.0
// The page: HTML without scripts that loads nothing, in the style of tools/plot_run.py's pages.
#include <algorithm>
#include <cmath>
#include <map>

#include "ddp/core/error.hpp"
#include "ddp/detail/text.hpp"
#include "report.hpp"

namespace cluster_check {
namespace {

constexpr const char* kHead = R"(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>cluster_check</title><style>
html { background: #fff; color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #111; max-width: 74rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; display: block; overflow-x: auto; }
table.checks { display: table; width: 100%; } .checks td:first-child { width: 13rem; } tr.bad { background: #fdecee; }
th, td { padding: .25rem .45rem; text-align: right; border-bottom: 1px solid #ddd; vertical-align: top; white-space: nowrap; }
th { border-bottom: 2px solid #888; } .text { text-align: left; } td.note { text-align: left; white-space: normal; width: 50%; }
.pass { color: #1a6b2d; } .fail { color: #b00020; font-weight: bold; } .na { color: #777; }
.verdict { padding: .6rem .9rem; border-left: 5px solid; background: #f5f5f5; }
td.heat { text-align: right; } small, figcaption { color: #555; } figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; }
svg text { font-size: 12px; fill: #333; } .grid { stroke: #e3e3e3; } .line { fill: none; stroke-width: 1.8; }
</style></head><body>
)";

std::string escape(const std::string& text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

const char* style_of(Verdict verdict) {
  return verdict == Verdict::Fail ? "fail" : verdict == Verdict::Pass ? "pass" : "na";
}

void write_summary(std::ostream& out, const Report& report) {
  const auto failures = failures_of(report);
  out << "<h1>cluster_check</h1>\n<p class=\"verdict " << (failures.empty() ? "pass" : "fail")
      << "\">";
  out << escape(verdict_of(report)) << '.';
  std::map<std::string, int> nodes;
  for (const auto& info : report.ranks) {
    ++nodes[info.host];
  }
  const auto& first = report.ranks.front();
  out << "</p>\n<p>" << report.ranks.size() << (report.ranks.size() == 1 ? " rank" : " ranks")
      << " on " << nodes.size() << (nodes.size() == 1 ? " node" : " nodes") << ", "
      << escape(first.gpu_name.empty() ? "CPU" : first.gpu_name) << ", communicator "
      << escape(first.backend) << ", started by " << escape(first.launch) << ". "
      << escape(report.started) << " UTC, " << format_number(std::round(report.seconds))
      << " s. Thresholds: " << escape(report.thresholds) << (report.quick ? ". A quick run." : ".")
      << "</p>\n";
  if (!failures.empty()) {
    out << "<ul>\n";
    for (const auto& sentence : failures) {
      out << "<li class=fail>" << escape(sentence) << "</li>\n";
    }
    out << "</ul>\n";
  }
}

void write_lines(std::ostream& out, const Report& report) {
  static const std::map<std::string, const char*> titles = {{"health", "Health"},
                                                            {"gpu", "One GPU"},
                                                            {"collectives", "All ranks"},
                                                            {"training", "Training"}};
  const bool is_alone = report.ranks.size() == 1;
  std::string group;
  for (const auto& line : lines_of(report)) {
    if (line.group != group) {
      out << (group.empty() ? "" : "</table>\n");
      group = line.group;
      out << "<h2>" << titles.at(group) << "</h2>\n<table class=checks><tr><th class=text>check"
          << (is_alone ? "<th>value" : "<th>lowest<th>median<th>highest")
          << "<th class=text>unit<th class=text>threshold<th class=text>verdict"
          << (is_alone ? "" : "<th class=text>worst") << "<th class=text>details</tr>\n";
    }
    const bool known = line.num_values > 0;
    const auto cell = [&](double value) { return known ? format_number(value) : "n/a"; };
    out << (line.verdict == Verdict::Fail ? "<tr class=bad>" : "<tr>") << "<td class=text>"
        << line.name << "<td>" << cell(line.low);
    if (!is_alone) {
      out << "<td>" << cell(line.median) << "<td>" << cell(line.high);
    }
    out << "<td class=text>" << escape(line.unit) << "<td class=text>" << escape(line.threshold)
        << "<td class=\"text " << style_of(line.verdict) << "\">" << to_string(line.verdict)
        << (is_alone ? "" : "<td class=text>");
    out << escape(worst_of(report, line)) << "<td class=note>" << escape(line.text) << "</tr>\n";
  }
  out << (group.empty() ? "" : "</table>\n");
}

/// Bus bandwidth over the size, both on logarithmic axes.
void write_chart(std::ostream& out, const Report& report) {
  constexpr double kWidth = 640, kHeight = 260, kLeft = 64, kBottom = 34, kTop = 10, kRight = 30;
  if (report.points.size() < 2) {
    return;
  }
  double low = INFINITY, high = 0, first = INFINITY, last = 0;
  for (const auto& point : report.points) {
    low = std::min(low, std::log10(point.busbw));
    high = std::max(high, std::log10(point.busbw));
    first = std::min(first, std::log2(static_cast<double>(point.bytes)));
    last = std::max(last, std::log2(static_cast<double>(point.bytes)));
  }
  low = std::floor(low);
  high = std::max(std::ceil(high), low + 1);
  const auto x = [&](double log2_bytes) {
    return kLeft + (kWidth - kLeft - kRight) * (log2_bytes - first) / std::max(last - first, 1.0);
  };
  const auto y = [&](double log10_rate) {
    return kTop + (kHeight - kTop - kBottom) * (high - log10_rate) / (high - low);
  };
  out << "<figure><svg viewBox=\"0 0 " << kWidth << ' ' << kHeight << "\" width=\"" << kWidth
      << "\">\n";
  for (double power = low; power <= high; ++power) {
    out << "<line class=grid x1=" << kLeft << " x2=" << kWidth - kRight << " y1=" << y(power)
        << " y2=" << y(power) << " /><text text-anchor=end x=" << kLeft - 6 << " y=" << y(power) + 4
        << '>' << format_number(std::pow(10, power)) << "</text>\n";
  }
  for (const auto& [log2_bytes, name] : {std::pair{10, "1 KiB"},
                                         {14, "16 KiB"},
                                         {18, "256 KiB"},
                                         {22, "4 MiB"},
                                         {26, "64 MiB"},
                                         {30, "1 GiB"}}) {
    if (log2_bytes >= first && log2_bytes <= last) {
      out << "<text text-anchor=middle x=" << x(log2_bytes) << " y=" << kHeight - 12 << '>' << name
          << "</text>\n";
    }
  }
  static const std::map<std::string, const char*> colours = {
      {"all_reduce", "#1f77b4"}, {"all_gather", "#2ca02c"}, {"reduce_scatter", "#d62728"}};
  ddp::detail::TextStream caption;
  for (const auto& [operation, colour] : colours) {
    ddp::detail::TextStream points;
    for (const auto& point : report.points) {
      if (point.operation == operation && point.busbw > 0) {
        points << x(std::log2(static_cast<double>(point.bytes))) << ','
               << y(std::log10(point.busbw)) << ' ';
      }
    }
    if (!points.str().empty()) {
      out << "<polyline class=line stroke=\"" << colour << "\" points=\"" << points.str()
          << "\" />\n";
      caption << " <b style=\"color:" << colour << "\">" << operation << "</b>";
    }
  }
  out << "</svg><figcaption>Bus bandwidth, GB/s:" << caption.str() << "</figcaption></figure>\n";
}

void write_points(std::ostream& out, const Report& report) {
  if (report.points.empty()) {
    return;
  }
  out << "<h2>Collectives by size</h2>\n";
  write_chart(out, report);
  out << "<table><tr><th class=text>operation<th>bytes<th>us<th>algbw GB/s<th>busbw GB/s</tr>\n";
  for (const auto& point : report.points) {
    out << "<tr><td class=text>" << point.operation << "<td>" << point.bytes << "<td>"
        << format_number(point.microseconds) << "<td>" << format_number(point.algbw) << "<td>"
        << format_number(point.busbw) << "</tr>\n";
  }
  out << "</table>\n";
}

void write_pairs(std::ostream& out, const Report& report) {
  if (report.pairs.empty()) {
    return;
  }
  double fastest = 0;
  for (const auto& row : report.pairs) {
    fastest = std::max(fastest, *std::max_element(row.begin(), row.end()));
  }
  out << "<h2>Send and receive between pairs</h2>\n<p>GB/s from the row's rank to the column's, "
      << report.pair_bytes / (1 << 20)
      << " MiB. Disjoint pairs send at the same time. Darker is slower.</p>\n<table><tr><th>";
  for (std::size_t to = 0; to < report.pairs.size(); ++to) {
    out << "<th>" << to;
  }
  out << "</tr>\n";
  for (std::size_t from = 0; from < report.pairs.size(); ++from) {
    out << "<tr><th>" << from;
    for (std::size_t to = 0; to < report.pairs.size(); ++to) {
      const double share = fastest > 0 ? report.pairs[from][to] / fastest : 1;
      if (from == to) {
        out << "<td>–";
      } else {
        out << "<td class=heat style=\"background:rgba(214,39,40,"
            << format_number(0.6 * (1 - share)) << ")\">" << format_number(report.pairs[from][to]);
      }
    }
    out << "</tr>\n";
  }
  out << "</table>\n";
}

void write_ranks(std::ostream& out, const Report& report) {
  out << "<h2>Ranks</h2>\n<table><tr><th>rank<th class=text>node<th>local rank"
         "<th class=text>device<th class=text>GPU</tr>\n";
  for (std::size_t rank = 0; rank < report.ranks.size(); ++rank) {
    const auto& info = report.ranks[rank];
    out << "<tr><td>" << rank << "<td class=text>" << escape(info.host) << "<td>" << info.local_rank
        << "<td class=text>" << escape(info.device) << "<td class=text>" << escape(info.gpu_name)
        << "</tr>\n";
  }
  out << "</table>\n<h2>Versions of rank 0</h2>\n<pre>" << escape(report.versions) << "</pre>\n";
}

/// Every value of every rank, where there are several.
void write_values(std::ostream& out, const Report& report) {
  if (report.ranks.size() == 1) {
    return;
  }
  out << "<h2>All values</h2>\n<details><summary>" << report.rows.size()
      << " rows</summary>\n<table><tr><th class=text>check<th class=text>place<th>value"
         "<th class=text>unit<th class=text>verdict<th class=text>details</tr>\n";
  for (const auto& row : report.rows) {
    out << "<tr><td class=text>" << row.group << '.' << row.name << "<td class=text>"
        << escape(place_of(report, row.rank)) << "<td>"
        << (row.value ? format_number(*row.value) : "n/a") << "<td class=text>" << escape(row.unit)
        << "<td class=\"text " << style_of(row.verdict) << "\">" << to_string(row.verdict)
        << "<td class=note>" << escape(row.text) << "</tr>\n";
  }
  out << "</table></details>\n";
}

}  // namespace

std::string to_html(const Report& report) {
  ddp::detail::TextStream out;
  out << kHead;
  write_summary(out, report);
  write_lines(out, report);
  write_points(out, report);
  write_pairs(out, report);
  write_ranks(out, report);
  write_values(out, report);
  out << "</body></html>\n";
  return out.str();
}

}  // namespace cluster_check
