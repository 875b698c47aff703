// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/files/metrics_writers.hpp"

#include <algorithm>
#include <utility>

#include "train/metrics/metrics_format.hpp"

namespace ddp {

void MetricsWriter::begin(const std::string& /*folder*/, const std::string& /*settings*/) {}

namespace detail {
namespace {

bool has(const std::vector<std::string>& columns, const std::string& name) {
  return std::find(columns.begin(), columns.end(), name) != columns.end();
}

/// The row's cells by column; an empty cell for a column that it lacks.
MetricsRow ordered(const std::vector<std::string>& columns, const MetricsRow& row) {
  MetricsRow result;
  for (const std::string& column : columns) {
    const auto found = std::find_if(row.begin(), row.end(),
                                    [&](const MetricsCell& cell) { return cell.name == column; });
    result.push_back(found == row.end() ? MetricsCell{.name = column} : *found);
  }
  return result;
}

}  // namespace

void CsvWriter::write(const std::string& table, const MetricsRow& row) {
  Columns& columns = columns_of(table, row);
  add_columns(table, columns, row);
  const MetricsRow cells = ordered(columns, row);
  folder_.append(table + ".csv", csv_line(cells), csv_header(cells));
}

CsvWriter::Columns& CsvWriter::columns_of(const std::string& table, const MetricsRow& row) {
  auto& columns = columns_[table];
  if (columns.empty()) {
    const auto text = folder_.read(table + ".csv");  // of the run that this one continues
    columns = text.empty() ? column_names(row) : csv_fields(text.substr(0, text.find('\n')));
  }
  return columns;
}

void CsvWriter::add_columns(const std::string& table, Columns& columns, const MetricsRow& row) {
  std::string added, commas;
  for (const MetricsCell& cell : row) {
    if (!has(columns, cell.name)) {
      columns.push_back(cell.name);
      added += "," + csv_field(cell.name);
      commas += ",";
    }
  }
  if (added.empty()) {
    return;
  }
  std::string text;
  std::string rest = folder_.read(table + ".csv");
  for (size_t begin = 0; begin < rest.size();) {
    const auto end = std::min(rest.find('\n', begin), rest.size());
    text += rest.substr(begin, end - begin) + (begin == 0 ? added : commas) + "\n";
    begin = end + 1;
  }
  folder_.write(table + ".csv", text);
}

void JsonlWriter::write(const std::string& table, const MetricsRow& row) {
  folder_.append(table + ".jsonl", json_line(row));
}

}  // namespace detail
}  // namespace ddp
