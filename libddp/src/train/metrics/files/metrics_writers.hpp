// SPDX-License-Identifier: Apache-2.0
// The rows of a run's metrics as files of its folder. Torch-free.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ddp/train/custom_metrics.hpp"
#include "train/metrics/files/run_folder.hpp"

namespace ddp::detail {

/// <table>.csv. A column that a later row brings is added to the file. The folder must outlive the
/// writer.
class CsvWriter : public MetricsWriter {
 public:
  explicit CsvWriter(RunFolder& folder) : folder_(folder) {}
  void write(const std::string& table, const MetricsRow& row) override;

 private:
  using Columns = std::vector<std::string>;
  Columns& columns_of(const std::string& table, const MetricsRow& row);
  void add_columns(const std::string& table, Columns& columns, const MetricsRow& row);

  RunFolder& folder_;
  std::map<std::string, Columns> columns_;  // by table, in the file's order
};

/// <table>.jsonl, an object in each line. The folder must outlive the writer.
class JsonlWriter : public MetricsWriter {
 public:
  explicit JsonlWriter(RunFolder& folder) : folder_(folder) {}
  void write(const std::string& table, const MetricsRow& row) override;

 private:
  RunFolder& folder_;
};

/// Removes the rows of `table` (CSV and JSONL) whose `column` is at least `first`, and an
/// unfinished last line, and logs that. A file is replaced atomically, so a crash loses no other
/// row.
void remove_rows_from(RunFolder& folder, const std::string& table, const std::string& column,
                      int64_t first);

}  // namespace ddp::detail
