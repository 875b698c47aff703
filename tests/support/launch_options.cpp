// SPDX-License-Identifier: Apache-2.0
#include "support/launch_options.hpp"

#include <stdexcept>

namespace ddp::test {
namespace {

double to_number(const std::string& option, const std::string& text) {
  std::size_t used = 0;
  double value = 0;
  try {
    value = std::stod(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != text.size()) {
    throw std::runtime_error(option + ": \"" + text + "\" is not a number");
  }
  return value;
}

std::pair<std::string, std::string> split_at_colon(const std::string& option,
                                                   const std::string& text) {
  const auto colon = text.find(':');
  if (colon == std::string::npos) {
    throw std::runtime_error(option + ": \"" + text + "\" lacks the rank, as in 1:76");
  }
  return {text.substr(0, colon), text.substr(colon + 1)};
}

// "1:137,*:76": rank 1 is killed, all other ranks exit with 76.
void parse_expected_exits(const std::string& text, LaunchOptions& options) {
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const auto end = std::min(text.find(',', begin), text.size());
    const auto [rank, code] = split_at_colon("--expect-exit", text.substr(begin, end - begin));
    const int exit_code = static_cast<int>(to_number("--expect-exit", code));
    if (rank == "*") {
      options.default_expected = exit_code;
    } else {
      options.expected[static_cast<int>(to_number("--expect-exit", rank))] = exit_code;
    }
    begin = end + 1;
  }
}

bool set_value(const std::string& option, const std::string& value, LaunchOptions& options) {
  if (option == "--ranks") {
    options.ranks = static_cast<int>(to_number(option, value));
  } else if (option == "--timeout") {
    options.timeout_s = to_number(option, value);
  } else if (option == "--grace") {
    options.grace_s = to_number(option, value);
  } else if (option == "--expect-exit") {
    parse_expected_exits(value, options);
  } else if (option == "--expect-output") {
    const auto [rank, text] = split_at_colon(option, value);
    options.expected_output.emplace_back(static_cast<int>(to_number(option, rank)), text);
  } else if (option == "--skip") {
    options.skip_reason = value;
  } else if (option == "--launch") {
    if (value != "mpi" && value != "env") {
      throw std::runtime_error("--launch: \"" + value + "\" is neither mpi nor env");
    }
    options.use_mpi = value == "mpi";
  } else {
    return false;
  }
  return true;
}

}  // namespace

LaunchOptions parse_launch_options(int argc, char** argv) {
  LaunchOptions options;
  int at = 1;
  for (; at < argc && std::string(argv[at]) != "--"; ++at) {
    const std::string option = argv[at];
    if (option == "--gpus") {
      options.need_gpus = true;
      options.use_mpi = false;
    } else if (option == "--verbose") {
      options.verbose = true;
    } else if (at + 1 >= argc || !set_value(option, argv[at + 1], options)) {
      throw std::runtime_error("unknown option, or one without its value: " + option);
    } else {
      ++at;
    }
  }
  options.command.assign(argv + std::min(at + 1, argc), argv + argc);
  if (options.command.empty() || options.ranks < 1 || options.ranks > 1024) {
    throw std::runtime_error("needs --ranks 1..1024 and a command after --");
  }
  return options;
}

}  // namespace ddp::test
