// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/files/outdated_rows.hpp"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/settings/parse_number.hpp"
#include "train/metrics/metrics_format.hpp"

namespace ddp::detail {
namespace {

/// A row's number in the column; nothing if it has none.
using NumberOf = std::function<std::optional<double>(const std::string& line)>;

bool remove_lines(RunFolder& folder, const std::string& file, bool has_header,
                  const NumberOf& number_of, int64_t first) {
  const std::string text = folder.read(file);
  std::string kept;
  bool keeps_rows = false;
  for (size_t begin = 0; begin < text.size();) {
    const auto end = text.find('\n', begin);
    if (end == std::string::npos) {
      break;  // a crash cut the line
    }
    const auto line = text.substr(begin, end - begin);
    const bool is_header = has_header && begin == 0;
    if (is_header || number_of(line).value_or(-1) < static_cast<double>(first)) {
      kept += line + "\n";
      keeps_rows = keeps_rows || !is_header;
    }
    begin = end + 1;
  }
  if (kept.size() == text.size()) {
    return false;
  }
  if (!folder.keep_copy(file)) {
    return false;  // rows of two starts are better than lost ones
  }
  folder.write(file, keeps_rows ? kept : "");  // an empty file gets its header again
  return true;
}

NumberOf in_csv(const std::string& header, const std::string& column) {
  const auto columns = csv_fields(header);
  const auto place =
      static_cast<size_t>(std::find(columns.begin(), columns.end(), column) - columns.begin());
  return [place](const std::string& line) -> std::optional<double> {
    const auto fields = csv_fields(line);
    return place < fields.size() ? parse_number<double>(fields[place]) : std::nullopt;
  };
}

NumberOf in_jsonl(const std::string& column) {
  return [column](const std::string& line) -> std::optional<double> {
    const auto row = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool has_it = row.is_object() && row.contains(column) && row[column].is_number();
    return has_it ? std::optional(row[column].get<double>()) : std::nullopt;
  };
}

}  // namespace

bool remove_rows_from(RunFolder& folder, const std::string& table, const std::string& column,
                      int64_t first) {
  const auto text = folder.read(table + ".csv");
  const auto number_of = in_csv(text.substr(0, text.find('\n')), column);
  const bool in_csv_file =
      remove_lines(folder, table + ".csv", /*has_header=*/true, number_of, first);
  const bool in_jsonl_file =
      remove_lines(folder, table + ".jsonl", /*has_header=*/false, in_jsonl(column), first);
  return in_csv_file || in_jsonl_file;
}

}  // namespace ddp::detail
