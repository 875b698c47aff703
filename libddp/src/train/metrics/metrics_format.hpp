// SPDX-License-Identifier: Apache-2.0
// The metrics of a run as text: log line, CSV, JSONL, progress bar. Torch-free.
// ddp/train/metrics.hpp defines each metric.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "train/metrics/custom_numbers.hpp"

namespace ddp::detail {

using Cell = MetricsCell;
using Row = MetricsRow;

/// `text` as a CSV field, quoted if RFC 4180 requires it.
std::string csv_field(const std::string& text);
/// The fields of one line.
std::vector<std::string> csv_fields(const std::string& line);
std::string csv_header(const Row& row);
std::string csv_line(const Row& row);
/// One JSON object; unknown values are omitted, and values that JSON cannot express are text:
/// "nan".
std::string json_line(const Row& row);

struct LoggedNumbers {
  int64_t step = 0;
  std::optional<double> epoch = {};
  std::optional<double> loss = {};
  std::optional<double> accuracy = {};
  std::optional<double> lr = {};
  std::optional<double> grad_norm = {};
  std::optional<double> step_ms = {};
  std::optional<double> samples_per_second = {};
  std::optional<double> samples_per_second_per_rank = {};
  std::optional<double> tflops_per_rank = {};
  std::optional<double> mfu = {};  ///< 0..1
  std::optional<double> exposed_comm_ms = {};
  std::optional<double> loader_wait_ms = {};
  std::optional<double> peak_memory_gib = {};
  std::optional<double> interval_seconds = {};
  std::optional<double> energy_j = {};
  std::vector<CustomResult> custom = {};
  std::string sample_unit = "samples";  ///< unit of the rates
};
/// For measured numbers: NaN means not measured.
inline std::optional<double> if_measured(double number) {
  return std::isnan(number) ? std::nullopt : std::optional(number);
}
/// Appends a cell for each metric. Throws SettingsError for a name that the row has.
void add_custom(Row& row, const std::vector<CustomResult>& custom);
Row step_row(const LoggedNumbers& numbers, double unix_time);
std::vector<std::string> column_names(const Row& row);

/// What fits 120 columns of a terminal, beside the prefix of a log line.
inline constexpr size_t kLogColumns =
    120 - std::char_traits<char>::length("[22:43:25.111] [info] rank 0: ");
/// "step 120/1000 | epoch 1.20 | loss 1.2345 | …". max_steps 0: unknown. Omits unknown numbers,
/// waits of less than 1 % of a step, and a learning rate and a memory that the `previous` line has.
/// If the line has more than `columns`, it also omits the least important numbers.
std::string log_line(const LoggedNumbers& numbers, int64_t max_steps, double eta_seconds,
                     const LoggedNumbers& previous = {}, size_t columns = kLogColumns);
struct EvaluationNumbers {
  int64_t done = 0;  ///< steps done
  std::optional<double> epoch = {};
  std::optional<double> loss = {};
  std::optional<double> accuracy = {};
  std::vector<CustomResult> custom = {};
};
/// "step 120/1000 | eval loss 1.2345 | eval accuracy 50.00 %".
std::string evaluation_line(const EvaluationNumbers& numbers, int64_t max_steps);
/// "[=====>      ]  12 % | step 120/1000 | ETA 00:03:12 | loss 1.2345", at most `columns` wide.
std::string progress_bar(int64_t done, int64_t max_steps, double eta_seconds,
                         std::optional<double> loss, int columns);
/// "00:03:12", "2d 03:00:00"; "?" if unknown.
std::string format_duration(double seconds);

/// The commit checked out in the Git working tree of `folder`, read from its files alone; empty
/// without a working tree.
std::string read_git_commit(const std::string& folder);

}  // namespace ddp::detail
