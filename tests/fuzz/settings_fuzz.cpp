// SPDX-License-Identifier: Apache-2.0
// A settings file and a command line: the YAML up to the first record separator (0x1e), then one
// argument after each separator.
#include "core/settings/command_line.hpp"
#include "core/settings/settings.hpp"
#include "fuzz/fuzz.hpp"
#include "unit/core/sample_options.hpp"

namespace {

// Of NumberOrAuto, the one kind that the sample lacks.
struct Limits {
  ddp::NumberOrAuto limit;
};
void describe_fields(Limits& limits, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "limit", .doc = "a number or auto", .min = 0}, limits.limit);
}

ddp::SettingRows read_all(ddp::Settings& settings) {
  sample::Options options;
  Limits limits;
  settings.read("sample", options);
  settings.read("limits", limits);
  auto rows = ddp::list_settings("sample", options);
  for (auto& row : ddp::list_settings("limits", limits)) {
    rows.push_back(std::move(row));
  }
  return rows;
}

// Of settings that no part of the program has read yet.
void read_back(const ddp::SettingRows& rows) {
  const auto text = ddp::settings_yaml(rows);  // may refuse to write
  ddp::Settings saved;
  fuzz::read_back([&] { saved.add_yaml(text, "saved.yaml"); });
  fuzz::require(ddp::settings_canonical(saved.unread_rows()) == ddp::settings_canonical(rows),
                "unread settings are read back");
}

void read_settings(const std::vector<std::string>& parts) {
  ddp::Settings settings;
  settings.add_yaml(parts.front(), "input.yaml");
  for (std::size_t i = 1; i < parts.size(); ++i) {
    settings.add_override(parts[i]);
  }
  read_back(settings.unread_rows());
  const auto rows = read_all(settings);
  (void)fuzz::accepts([&] { settings.require_all_read(); });

  const auto text = ddp::settings_yaml(rows);
  ddp::Settings saved;
  const auto again = fuzz::read_back([&] {
    saved.add_yaml(text, "saved.yaml");
    auto all = read_all(saved);
    saved.require_all_read();
    return all;
  });
  fuzz::require(ddp::settings_canonical(rows) == ddp::settings_canonical(again),
                "saved settings are read back");
}

void read_command_line(const std::vector<std::string>& parts) {
  std::vector<const char*> arguments{"program"};
  for (std::size_t i = 1; i < parts.size(); ++i) {
    arguments.push_back(parts[i].c_str());
  }
  (void)ddp::parse_command_line(static_cast<int>(arguments.size()), arguments.data());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  const auto parts = fuzz::split(fuzz::view(data, size), '\x1e');
  (void)fuzz::accepts([&] { read_settings(parts); });
  (void)fuzz::accepts([&] { read_command_line(parts); });
  return 0;
}
