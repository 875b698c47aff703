// SPDX-License-Identifier: Apache-2.0
#include "core/log/terminal.hpp"

#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "core/settings/parse_number.hpp"

namespace ddp {
namespace {

// Signals that the pager handles: Ctrl-C at the pager must not end this program before it, and a
// closed pager is no error.
class IgnoredSignals {
 public:
  IgnoredSignals()
      : interrupt_(std::signal(SIGINT, SIG_IGN)), pipe_(std::signal(SIGPIPE, SIG_IGN)) {}
  ~IgnoredSignals() {
    std::signal(SIGINT, interrupt_);
    std::signal(SIGPIPE, pipe_);
  }
  IgnoredSignals(const IgnoredSignals&) = delete;
  IgnoredSignals& operator=(const IgnoredSignals&) = delete;

 private:
  void (*interrupt_)(int);
  void (*pipe_)(int);
};

// Returns whether a pager showed the text.
bool page(const std::string& text) {
  constexpr int kNotFound = 127;  // the shell's exit code
  const char* chosen = std::getenv("PAGER");
  const std::string pager =
      chosen != nullptr ? chosen : "command -v less >/dev/null || exit 127; exec less -FRX";
  if (pager.empty()) {
    return false;
  }
  std::FILE* pipe = popen(pager.c_str(), "w");
  if (pipe == nullptr) {
    return false;
  }
  const IgnoredSignals ignored;  // by this process alone: the pager has started
  std::fwrite(text.data(), 1, text.size(), pipe);
  const int status = pclose(pipe);
  return !(WIFEXITED(status) && WEXITSTATUS(status) == kNotFound);
}

}  // namespace

std::optional<int> terminal_columns(int file) {
  winsize size{};
  const bool known = ioctl(file, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? std::optional<int>(size.ws_col) : std::nullopt;
}

std::size_t terminal_width() {
  constexpr int64_t kLeast = 40, kUsual = 80, kMost = 120;  // longer lines are hard to read
  int64_t columns = 0;
  const char* text = std::getenv("COLUMNS");
  const auto given =
      text == nullptr ? std::nullopt : detail::parse_number<int64_t>(std::string(text));
  if (given && *given > 0) {
    columns = *given;
  } else {
    columns = terminal_columns(STDOUT_FILENO).value_or(kUsual);
  }
  return static_cast<std::size_t>(std::clamp(columns, kLeast, kMost));
}

void print_paged(const std::string& text) {
  if (isatty(STDIN_FILENO) == 0 || isatty(STDOUT_FILENO) == 0 || !page(text)) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  }
}

}  // namespace ddp
