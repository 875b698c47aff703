// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/metrics_format.hpp"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/files/file_ops.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/text.hpp"

namespace ddp::detail {
namespace {

template <typename... Args>
std::string format(const char* pattern, Args... args) {
  const ClassicNumbers numbers;
  char text[128];
  std::snprintf(text, sizeof text, pattern, args...);
  return text;
}

// The shortest text that parses to the same double.
std::string shortest(double number) {
  if (std::isnan(number)) {
    return "nan";  // for either sign
  }
  char text[40];
  const auto end = std::to_chars(text, text + sizeof text, number).ptr;
  return {text, end};
}

// "d_loss 0.1234", "1520.3 tokens/s"; empty if unknown
std::string custom_text(const CustomResult& result) {
  if (!result.value) {
    return "";
  }
  const double value = std::isnan(*result.value) ? NAN : *result.value;
  return result.is_rate ? format("%.1f ", value) + result.name + "/s"
                        : result.name + format(" %.4g", value);
}

std::string step_text(int64_t step, int64_t max_steps) {
  return "step " + std::to_string(step) + (max_steps > 0 ? "/" + std::to_string(max_steps) : "");
}

std::string gib_text(std::optional<double> gib) {
  return gib ? format("peak %.2f GiB", *gib) : "";
}

// A wait of less than 1 % of the step does not matter.
std::optional<double> if_matters(std::optional<double> wait_ms, std::optional<double> step_ms) {
  return wait_ms && *wait_ms < 0.01 * step_ms.value_or(0) ? std::nullopt : wait_ms;
}

/// The parts of a log line, in order.
class LineParts {
 public:
  /// Of the parts that do not fit, those of the highest `rank` are left out first. 0: never.
  void add(int rank, std::string text) {
    if (!text.empty()) {
      parts_.emplace_back(rank, std::move(text));
    }
  }
  void add(int rank, const char* pattern, std::optional<double> number) {
    if (number) {
      add(rank, format(pattern, std::isnan(*number) ? NAN : *number));  // printf shows a sign
    }
  }
  std::string joined() const {
    std::string text;
    for (const auto& [rank, part] : parts_) {
      text += (text.empty() ? "" : " | ") + part;
    }
    return text;
  }
  std::string line(size_t columns) {
    auto text = joined();
    while (text.size() > columns) {
      const auto least = std::max_element(parts_.begin(), parts_.end(),
                                          [](auto& a, auto& b) { return a.first < b.first; });
      if (least->first == 0) {
        break;
      }
      parts_.erase(least);
      text = joined();
    }
    return text;
  }

 private:
  std::vector<std::pair<int, std::string>> parts_;
};

// A folder above this one may belong to someone else, who may put a named pipe there.
std::string text_of(const std::filesystem::path& path) {
  constexpr std::size_t kMostBytes = 64u << 20;
  std::string why;
  return read_start(path, kMostBytes, why).value_or("");
}

std::string first_line(const std::filesystem::path& path) {
  const auto text = text_of(path);
  return text.substr(0, text.find('\n'));
}

bool is_commit(const std::string& text) {
  return (text.size() == 40 || text.size() == 64) &&
         text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

std::string find_packed_ref(const std::filesystem::path& git, const std::string& ref) {
  std::istringstream packed(text_of(git / "packed-refs"));
  for (std::string line; std::getline(packed, line);) {
    if (line.size() > ref.size() + 1 && line.ends_with(" " + ref)) {
      return line.substr(0, line.find(' '));
    }
  }
  return "";
}

}  // namespace

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) {
    return text;
  }
  std::string quoted = "\"";
  for (const char c : text) {
    quoted += c == '"' ? "\"\"" : std::string(1, c);
  }
  return quoted + "\"";
}

std::vector<std::string> csv_fields(const std::string& line) {
  std::vector<std::string> fields(1);
  bool is_quoted = false;
  for (size_t i = 0; i < line.size(); ++i) {
    const bool is_pair = is_quoted && line.compare(i, 2, "\"\"") == 0;
    if (line[i] == '"' && !is_pair) {
      is_quoted = !is_quoted;
    } else if (line[i] == ',' && !is_quoted) {
      fields.emplace_back();
    } else {
      fields.back() += line[i];
      i += is_pair ? 1 : 0;
    }
  }
  return fields;
}

std::string csv_header(const Row& row) {
  std::string line;
  for (const auto& cell : row) {
    line += (line.empty() ? "" : ",") + csv_field(cell.name);
  }
  return line;
}

std::string csv_line(const Row& row) {
  std::string line;
  for (std::size_t i = 0; i < row.size(); ++i) {
    const Cell& cell = row[i];
    line += (i == 0 ? "" : ",") + (cell.integer         ? std::to_string(*cell.integer)
                                   : !cell.text.empty() ? csv_field(cell.text)
                                   : cell.number        ? shortest(*cell.number)
                                                        : "");
  }
  return line;
}

std::string json_line(const Row& row) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  for (const auto& cell : row) {
    if (cell.integer) {
      json[cell.name] = *cell.integer;
    } else if (!cell.text.empty()) {
      json[cell.name] = cell.text;
    } else if (cell.number && !std::isfinite(*cell.number)) {
      json[cell.name] = shortest(*cell.number);
    } else if (cell.number) {
      json[cell.name] = *cell.number;
    }
  }
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void add_custom(Row& row, const std::vector<CustomResult>& custom) {
  for (const CustomResult& result : custom) {
    const auto name = result.column();
    if (std::any_of(row.begin(), row.end(), [&](const Cell& cell) { return cell.name == name; })) {
      throw SettingsError(concat("metric \"", result.name, "\" would have a second column ", name,
                                 "; fix: choose another name"));
    }
    row.push_back({.name = name, .number = result.value});
  }
}

Row step_row(const LoggedNumbers& n, double unix_time) {
  Row row = {
      {.name = "step", .integer = n.step},
      {.name = "epoch", .number = n.epoch},
      {.name = "loss", .number = n.loss},
      {.name = "accuracy", .number = n.accuracy},
      {.name = "lr", .number = n.lr},
      {.name = "grad_norm", .number = n.grad_norm},
      {.name = "step_ms", .number = n.step_ms},
      {.name = n.sample_unit + "_per_second", .number = n.samples_per_second},
      {.name = n.sample_unit + "_per_second_per_rank", .number = n.samples_per_second_per_rank},
      {.name = "exposed_comm_ms", .number = n.exposed_comm_ms},
      {.name = "loader_wait_ms", .number = n.loader_wait_ms},
      {.name = "peak_memory_gib", .number = n.peak_memory_gib},
      {.name = "interval_seconds", .number = n.interval_seconds},
      {.name = "energy_j", .number = n.energy_j},
      {.name = "tflops_per_rank", .number = n.tflops_per_rank},
      {.name = "mfu", .number = n.mfu}};
  add_custom(row, n.custom);
  row.push_back({.name = "time", .number = unix_time});
  return row;
}

std::vector<std::string> column_names(const Row& row) {
  std::vector<std::string> names;
  for (const Cell& cell : row) {
    names.push_back(cell.name);
  }
  return names;
}

std::string log_line(const LoggedNumbers& n, int64_t max_steps, double eta_seconds,
                     const LoggedNumbers& previous, size_t columns) {
  LineParts parts;
  parts.add(0, step_text(n.step, max_steps));
  parts.add(4, "epoch %.2f", n.epoch);
  parts.add(0, "loss %.4f", n.loss);
  parts.add(0, "accuracy %.2f %%", n.accuracy ? std::optional(100 * *n.accuracy) : std::nullopt);
  for (const CustomResult& result : n.custom) {
    parts.add(0, custom_text(result));
  }
  parts.add(5, "lr %.3g", n.lr == previous.lr ? std::nullopt : n.lr);
  parts.add(3, "grad_norm %.3g", n.grad_norm);
  parts.add(6, "%.1f ms/step", n.step_ms);
  if (n.samples_per_second) {
    const char* pattern = *n.samples_per_second < 1000 ? "%.1f " : "%.0f ";
    parts.add(1, format(pattern, *n.samples_per_second) + n.sample_unit + "/s");
  }
  parts.add(4, "MFU %.1f %%", n.mfu ? std::optional(100 * *n.mfu) : std::nullopt);
  parts.add(2, "exposed comm %.2f ms", if_matters(n.exposed_comm_ms, n.step_ms));
  parts.add(2, "loader wait %.2f ms", if_matters(n.loader_wait_ms, n.step_ms));
  const auto peak = gib_text(n.peak_memory_gib);
  parts.add(7, peak == gib_text(previous.peak_memory_gib) ? "" : peak);
  if (n.step < max_steps && !std::isnan(eta_seconds)) {
    parts.add(0, "ETA " + format_duration(eta_seconds));
  }
  return parts.line(columns);
}

std::string evaluation_line(const EvaluationNumbers& n, int64_t max_steps) {
  LineParts parts;
  parts.add(0, step_text(n.done, max_steps));
  parts.add(0, "eval loss %.4f", n.loss);
  parts.add(0, "eval accuracy %.2f %%",
            n.accuracy ? std::optional(100 * *n.accuracy) : std::nullopt);
  for (const CustomResult& result : n.custom) {
    parts.add(0, custom_text(result));
  }
  return parts.joined();
}

std::string progress_bar(int64_t done, int64_t max_steps, double eta_seconds,
                         std::optional<double> loss, int columns) {
  LineParts parts;
  if (max_steps > 0) {
    const double share =
        std::clamp(static_cast<double>(done) / static_cast<double>(max_steps), 0.0, 1.0);
    constexpr int kWidth = 24;
    const int full = static_cast<int>(share * kWidth);
    parts.add(0, "[" + std::string(full, '=') + (full < kWidth ? ">" : "") +
                     std::string(std::max(0, kWidth - full - 1), ' ') + "] " +
                     format("%3.0f %%", 100 * share));
  }
  parts.add(0, step_text(done, max_steps));
  if (max_steps > 0) {
    parts.add(0, "ETA " + format_duration(eta_seconds));
  }
  parts.add(0, "loss %.4f", loss);
  auto text = parts.joined();
  if (columns > 1 && text.size() >= static_cast<std::size_t>(columns)) {
    text.resize(static_cast<std::size_t>(columns) - 1);
  }
  return text;
}

std::string format_duration(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9) {
    return "?";
  }
  const auto total = static_cast<int64_t>(std::llround(seconds));
  const auto days = total / 86400;
  const auto clock = format("%02d:%02d:%02d", static_cast<int>(total / 3600 % 24),
                            static_cast<int>(total / 60 % 60), static_cast<int>(total % 60));
  return days > 0 ? std::to_string(days) + "d " + clock : clock;
}

std::string read_git_commit(const std::string& folder) {
  std::error_code ignored;
  auto here = std::filesystem::absolute(folder, ignored);
  while (!std::filesystem::exists(here / ".git", ignored)) {
    if (here == here.parent_path()) {
      return "";
    }
    here = here.parent_path();
  }
  std::filesystem::path git = here / ".git";
  if (std::filesystem::is_regular_file(git, ignored)) {  // a linked working tree: "gitdir: PATH"
    const auto line = first_line(git);
    git = here / (line.starts_with("gitdir: ") ? line.substr(8) : "");
  }
  auto head = first_line(git / "HEAD");
  if (head.starts_with("ref: ")) {
    const auto ref = head.substr(5);
    const auto common = first_line(git / "commondir");
    const auto refs = common.empty() ? git : git / common;
    head = first_line(refs / ref);
    if (head.empty()) {
      head = find_packed_ref(refs, ref);
    }
  }
  return is_commit(head) ? head : "";
}

}  // namespace ddp::detail
