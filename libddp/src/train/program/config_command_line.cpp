// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/command_line.hpp"

#include <algorithm>
#include <cstdio>

#include "core/launch/detect_launch.hpp"
#include "core/log/terminal.hpp"
#include "core/settings/command_line.hpp"
#include "core/settings/completion.hpp"
#include "core/settings/settings_help.hpp"
#include "ddp/core/error.hpp"
#include "ddp/train/config.hpp"
#include "train/program/help_version.hpp"

namespace ddp {
namespace {

// One rank answers for all.
bool is_first_rank() {
  try {
    return detect_launch_environment({}, process_environment()).rank == 0;
  } catch (const Error&) {
    return true;  // answers do not depend on the environment
  }
}

std::string requested_text(const CommandLine& line, const std::string& program,
                           const std::vector<Section>& sections) {
  if (line.version) {
    return detail::version_text();
  }
  const SettingRows defaults = Config::default_rows(sections);
  if (!line.completion.empty()) {
    return completion_script(line.completion, program, defaults);
  }
  return line.help_topic.empty() ? help_page(program, defaults, terminal_width())
                                 : help_topic(line.help_topic, defaults, terminal_width());
}

}  // namespace

bool detail::print_help_or_version(const CommandLine& line, const std::string& program,
                                   const std::vector<Section>& sections) {
  if (!line.help && !line.version && line.completion.empty()) {
    return false;
  }
  const std::string answer = requested_text(line, program, sections);
  if (is_first_rank()) {
    print_paged(answer);
  }
  return true;
}

bool answer_command_line(int argc, const char* const* argv, const std::string& usage) {
  const auto has = [&](const char* option) {
    return std::any_of(argv + std::min(argc, 1), argv + argc,
                       [&](const char* argument) { return std::string(argument) == option; });
  };
  const bool help = has("--help") || has("-h");
  if (!help && !has("--version")) {
    return false;
  }
  if (is_first_rank()) {
    print_paged(help ? usage : detail::version_text());
  }
  return true;
}

}  // namespace ddp
