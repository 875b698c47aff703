// SPDX-License-Identifier: Apache-2.0
#include "core/settings/command_line.hpp"

#include <algorithm>
#include <map>
#include <optional>

#include "ddp/core/error.hpp"

namespace ddp {
namespace {

[[noreturn]] void fail_unknown_argument(const std::string& argument) {
  const std::string bare =
      argument.substr(std::min(argument.size(), argument.find_first_not_of('-')));
  const bool is_key = bare.find('.') < bare.find('=') && bare.find('=') != std::string::npos;
  throw SettingsError(concat("unknown argument '", argument, "'; fix: ",
                             is_key
                                 ? concat("write ", bare, " without dashes")
                                 : "there are --config FILE, --help, --show-settings, --summary, "
                                   "--version, --completion SHELL and key=value"));
}

// Reads the arguments from left to right.
class Parser {
 public:
  Parser(int argc, const char* const* argv) : arguments_(argv + std::min(argc, 1), argv + argc) {}

  CommandLine parse() {
    for (; next_ < arguments_.size(); ++next_) {
      if (!read_option()) {
        const std::string& argument = arguments_[next_];
        if (argument.starts_with('-')) {
          fail_unknown_argument(argument);
        }
        line_.overrides.push_back(argument);
      }
    }
    return line_;
  }

 private:
  bool read_option() {
    const std::string& argument = arguments_[next_];
    if (argument == "--version") {
      line_.version = true;
    } else if (argument == "--show-settings") {
      line_.show_settings = true;
    } else if (argument == "--summary") {
      line_.summary = true;
    } else if (argument == "--help" || argument == "-h") {
      line_.help = true;
      line_.help_topic = take_topic();
    } else if (argument.starts_with("--help=")) {
      line_.help = true;
      line_.help_topic = argument.substr(argument.find('=') + 1);
    } else if (const auto file = value_of("--config")) {
      set_config(*file);
    } else if (const auto shell = value_of("--completion")) {
      set_completion(*shell);
    } else {
      return false;
    }
    return true;
  }

  // The value of "--name VALUE" or "--name=VALUE"; empty if it is missing.
  std::optional<std::string> value_of(const std::string& name) {
    const std::string& argument = arguments_[next_];
    if (argument.starts_with(name + "=")) {
      return argument.substr(name.size() + 1);
    }
    if (argument != name) {
      return std::nullopt;
    }
    return ++next_ < arguments_.size() ? arguments_[next_] : "";
  }

  // The word after --help, unless it is an option or a setting.
  std::string take_topic() {
    if (next_ + 1 == arguments_.size() || arguments_[next_ + 1].starts_with('-') ||
        arguments_[next_ + 1].find('=') != std::string::npos) {
      return "";
    }
    return arguments_[++next_];
  }

  void set_config(const std::string& path) {
    if (!line_.config_file.empty() || path.empty()) {
      throw SettingsError("--config needs exactly one file; fix: --config FILE.yaml key=value ...");
    }
    line_.config_file = path;
  }

  void set_completion(const std::string& shell) {
    if (shell != "bash" && shell != "zsh") {
      throw SettingsError(concat("--completion ", shell, ": expected bash or zsh"));
    }
    line_.completion = shell;
  }

  std::vector<std::string> arguments_;
  std::size_t next_ = 0;
  CommandLine line_;
};

}  // namespace

CommandLine parse_command_line(int argc, const char* const* argv) {
  return Parser(argc, argv).parse();
}

std::vector<std::string> repeated_overrides(const CommandLine& line) {
  std::vector<std::string> sentences;
  std::map<std::string, std::string> newest;  // key=value by key
  for (const std::string& argument : line.overrides) {
    std::string& known = newest[argument.substr(0, argument.find('='))];
    if (!known.empty() && known != argument) {
      sentences.push_back(concat("the command line has ", known.substr(0, 120), " and later ",
                                 argument.substr(0, 120), ": the later one counts"));
    }
    known = argument;
  }
  return sentences;
}

const std::vector<std::pair<std::string, std::string>>& command_line_options() {
  static const std::vector<std::pair<std::string, std::string>> options = {
      {"--config FILE", "Read settings from a YAML file. Arguments key=value override it."},
      {"--help [TOPIC]",
       "Show this page, or the settings of a section, of one key or of all keys with a prefix. "
       "all: every setting."},
      {"--show-settings", "Print all settings at the start, not only changed ones."},
      {"--summary", "Print the parameters of the model when it is wrapped, then train as usual."},
      {"--version", "Print the versions of libddp and of the libraries it uses."},
      {"--completion SHELL", "Print the completion script for bash or zsh."}};
  return options;
}

std::string program_name(int argc, const char* const* argv) {
  const std::string path = argc > 0 ? argv[0] : "program";
  return path.substr(path.rfind('/') + 1);
}

}  // namespace ddp
