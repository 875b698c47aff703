// SPDX-License-Identifier: Apache-2.0
// The arguments of a program with settings: options and key=value.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace ddp {

struct CommandLine {
  std::string config_file;
  std::vector<std::string> overrides;
  bool help = false;
  std::string help_topic;  ///< empty: the short page
  bool version = false;
  std::string completion;  ///< the shell whose script is printed, or empty
  bool show_settings = false;
  bool summary = false;
};

/// Throws SettingsError for unknown options and missing values.
CommandLine parse_command_line(int argc, const char* const* argv);

/// A sentence for each key=value that a later one with another value replaces. Scripts append
/// settings to those of a list, so this is no error.
std::vector<std::string> repeated_overrides(const CommandLine& line);

/// The options and their meaning, for --help and the completion: ("--config FILE", "YAML file …").
const std::vector<std::pair<std::string, std::string>>& command_line_options();

/// The program's name without its folder.
std::string program_name(int argc, const char* const* argv);

}  // namespace ddp
