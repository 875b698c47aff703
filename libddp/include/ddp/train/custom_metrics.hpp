// SPDX-License-Identifier: Apache-2.0
// Metrics that a program names itself, and writers that receive the rows of all metrics.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ddp {

/// How the values of an interval and of all ranks become one number. Rate: their sum / the
/// interval's seconds, called "<name>_per_second". A NaN stays NaN.
enum class MetricReduction { Mean, Sum, Min, Max, Rate };

/// How Metrics::log treats a value.
struct LogOptions {
  MetricReduction reduction = MetricReduction::Mean;  ///< equal in all calls with one name
  double weight = 1;  ///< of this value in a mean, for example a batch's samples
};

/// A column's value: text, an integer, or a number; nothing and empty text mean "unknown". A NaN is
/// a number, so that a NaN loss is visible.
struct MetricsCell {
  std::string name;                     ///< of the column
  std::string text = "";                ///< if the value is a text
  std::optional<double> number = {};    ///< if it is a number
  std::optional<int64_t> integer = {};  ///< if it is a count
};
using MetricsRow = std::vector<MetricsCell>;  ///< in the order of the columns

/// Called on rank 0, from the training thread. An exception ends the run.
class MetricsWriter {
 public:
  virtual ~MetricsWriter() = default;
  /// Called once, before the first row. `folder`: the run folder, empty without one; `settings`:
  /// the resolved settings, one per line.
  virtual void begin(const std::string& folder, const std::string& settings);
  /// `table` is "steps" (a row for each logging step), "evals" or "epochs".
  virtual void write(const std::string& table, const MetricsRow& row) = 0;
};

}  // namespace ddp
