// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/files/metrics_writers.hpp"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "core/settings/parse_number.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
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

/// A line's number in the column; nothing if it has none.
using NumberOf = std::function<std::optional<double>(const std::string& line)>;

/// Whether there was a line to remove.
bool remove_lines(RunFolder& folder, const std::string& file, const NumberOf& number_of,
                  int64_t first) {
  const std::string text = folder.read(file);
  std::string kept;
  size_t begin = 0;
  for (auto end = text.find('\n'); end != std::string::npos; end = text.find('\n', begin)) {
    const auto line = text.substr(begin, end - begin);
    kept += number_of(line).value_or(-1) < static_cast<double>(first) ? line + "\n" : "";
    begin = end + 1;
  }
  if (kept.size() == text.size()) {
    return false;
  }
  folder.write(file, kept, Durability::Synced);
  return true;
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

void remove_rows_from(RunFolder& folder, const std::string& table, const std::string& column,
                      int64_t first) {
  const std::string csv = folder.read(table + ".csv");
  const auto columns = csv_fields(csv.substr(0, csv.find('\n')));
  const auto place =
      static_cast<size_t>(std::find(columns.begin(), columns.end(), column) - columns.begin());
  const NumberOf in_csv = [place](const std::string& line) -> std::optional<double> {
    const auto fields = csv_fields(line);
    return place < fields.size() ? parse_number<double>(fields[place]) : std::nullopt;
  };
  const NumberOf in_jsonl = [&column](const std::string& line) -> std::optional<double> {
    const auto row = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool has_it = row.is_object() && row.contains(column) && row[column].is_number();
    return has_it ? std::optional(row[column].get<double>()) : std::nullopt;
  };
  const bool in_csv_file = remove_lines(folder, table + ".csv", in_csv, first);
  if (remove_lines(folder, table + ".jsonl", in_jsonl, first) || in_csv_file) {
    log_info(concat("the run folder ", folder.path(), " had ", table, " of an earlier start from ",
                    column, " ", first, " on: they were removed, because this run writes them"));
  }
}

}  // namespace detail
}  // namespace ddp
