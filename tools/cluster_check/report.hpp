// SPDX-License-Identifier: Apache-2.0
// The report of all ranks: gathered on rank 0, as a table for a terminal, and as JSON, of which
// tools/plot_check.py makes a page.
#pragma once

#include <string>
#include <vector>

#include "row.hpp"
#include "run.hpp"

namespace cluster_check {

/// Moves all ranks' rows to rank 0's report. Collective.
void gather_report(Run& run);

/// All rows of one check.
struct Line {
  std::string group{}, name{}, unit{}, threshold{}, text{};
  Verdict verdict{};  ///< the worst of its rows
  int num_values = 0;
  double low = 0, median = 0, high = 0;
  const Row* worst = nullptr;  ///< the row at the bad end; nullptr without values
};
std::vector<Line> lines_of(const Report& report);

/// Of an even number of values: the mean of the middle two.
double median_of(std::vector<double> values);
/// "rank 3 (cuda:3, NVIDIA H200) on node n02"; "all ranks".
std::string place_of(const Report& report, int rank);
/// One sentence for each failed row.
std::vector<std::string> failures_of(const Report& report);
/// "all checks passed: 31 thresholds are met; not measured: health.nvlinks_down".
std::string verdict_of(const Report& report);
/// Where the worst value of a line is; empty if all ranks have the same.
std::string worst_of(const Report& report, const Line& line);
const char* to_string(Verdict verdict);
/// Four significant digits.
std::string format_number(double value);

std::string to_table(const Report& report);
std::string to_json(const Report& report);

}  // namespace cluster_check
