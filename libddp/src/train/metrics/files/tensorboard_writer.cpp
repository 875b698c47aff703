// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/files/tensorboard_writer.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <sstream>
#include <vector>

#include "core/control/wire/tcp_socket.hpp"
#include "core/settings/parse_number.hpp"
#include "ddp/core/error.hpp"
#include "train/metrics/files/tensorboard_events.hpp"

namespace ddp::detail {
namespace {

using tensorboard::Hparam;

// Sections that say where a run runs and what it writes.
constexpr const char* kOtherSections[] = {"checkpoint.", "context.", "metrics."};

double time_of_event() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

struct Setting {
  bool is_changed = false;
  std::string key, value;
};

// A line of settings is "  key   value", or "* key   value" if the value is not the default. Other
// lines, of programs with their own text, are left out.
std::vector<Setting> settings_of(const std::string& text) {
  std::vector<Setting> settings;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("  ") && !line.starts_with("* ")) {
      continue;
    }
    const auto end = std::min(line.find(' ', 2), line.size());
    const auto value = std::min(line.find_first_not_of(' ', end), line.size());
    if (end > 2) {
      settings.push_back({.is_changed = line[0] == '*',
                          .key = line.substr(2, end - 2),
                          .value = line.substr(value)});
    }
  }
  return settings;
}

// "32 samples" is the number 32, "2 of 3" is a text.
std::string without_unit(const std::string& value) {
  const auto unit = value.find(' ');
  const auto number = value.substr(0, unit);
  return parse_number<double>(number) && unit == value.rfind(' ') ? number : value;
}

std::string in_markdown(const std::string& text) {
  std::string result;
  for (const char c : text) {
    result += c == '|' ? "\\|" : std::string(1, c);
  }
  return result;
}

std::string table_of(const std::vector<Setting>& settings) {
  std::string table = "| setting | value | |\n|---|---|---|\n";
  for (const Setting& setting : settings) {
    table += concat("| ", in_markdown(setting.key), " | ", in_markdown(setting.value), " | ",
                    setting.is_changed ? "changed" : "", " |\n");
  }
  return table;
}

std::vector<Hparam> hparams_of(const std::vector<Setting>& settings) {
  std::vector<Hparam> hparams;
  for (const Setting& setting : settings) {
    const bool is_other =
        std::any_of(std::begin(kOtherSections), std::end(kOtherSections),
                    [&](const char* section) { return setting.key.starts_with(section); });
    if (!is_other) {
      hparams.push_back({.name = setting.key, .value = without_unit(setting.value)});
    }
  }
  return hparams;
}

// TensorBoard reads the files of a folder in the order of their names.
std::string file_name() {
  return concat("events.out.tfevents.", static_cast<int64_t>(1e6 * time_of_event()), ".",
                host_name(), ".", ::getpid());
}

std::optional<double> number_of(const MetricsCell& cell) {
  return cell.integer ? std::optional(static_cast<double>(*cell.integer)) : cell.number;
}

}  // namespace

void TensorboardWriter::begin(const std::string& folder, const std::string& settings) {
  name_ = std::filesystem::path(folder).filename();
  settings_ = settings;
}

void TensorboardWriter::start(int64_t steps_done) {
  const double now = time_of_event();
  step_ = steps_done;
  // It also drops what stands in front of it in this file, so it comes first.
  add(now,
      tensorboard::restart_event({.unix_time = now, .step = steps_done > 0 ? steps_done + 1 : 0}));
  add_settings(now);
}

void TensorboardWriter::add_settings(double unix_time) {
  const auto settings = settings_of(settings_);
  if (!settings.empty()) {
    const tensorboard::EventTime time{.unix_time = unix_time, .step = step_};
    add(unix_time, tensorboard::text_event(time, "settings", table_of(settings)));
    add(unix_time, tensorboard::hparams_event(time, name_, hparams_of(settings)));
  }
}

void TensorboardWriter::write(const std::string& table, const MetricsRow& row) {
  // Cells in front of the first "step" or "epoch" describe the run and do not change.
  const auto x = std::find_if(row.begin(), row.end(), [](const MetricsCell& cell) {
    return cell.name == "step" || cell.name == "epoch";
  });
  double time = time_of_event();
  std::vector<std::pair<std::string, double>> scalars;
  for (auto cell = x; cell != row.end(); ++cell) {
    const auto number = number_of(*cell);
    if (!number) {
      continue;
    }
    if (cell->name == "step") {
      step_ = cell->integer.value_or(step_);
    } else if (cell == x) {
      continue;  // an epoch's number
    } else if (cell->name == "time") {
      time = *number;
    } else {
      scalars.emplace_back(concat(table, "/", cell->name), *number);
    }
  }
  add(time, tensorboard::scalars_event({.unix_time = time, .step = step_}, scalars));
}

void TensorboardWriter::add(double unix_time, const std::string& event) {
  if (file_.empty()) {
    file_ = file_name();
    folder_.append_bytes(
        file_,
        tensorboard::framed(tensorboard::file_version_event({.unix_time = unix_time, .step = 0})));
  }
  folder_.append_bytes(file_, tensorboard::framed(event));
}

}  // namespace ddp::detail
