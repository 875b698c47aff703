// SPDX-License-Identifier: Apache-2.0
// Runs ddp::run in child processes, because it decides how a process ends.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "ddp/train/run.hpp"
#include "support/catch.hpp"

namespace testing {

struct Ended {
  int status = 0;
  std::string output;  // standard output and error
  int code() const { return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status); }
  bool says(const std::string& text) const { return output.find(text) != std::string::npos; }
};

struct Running {
  pid_t pid = 0;
  int output = -1;
};

inline Running start_child(const std::function<int()>& body) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    dup2(ends[1], STDOUT_FILENO);
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    for (const int number : {SIGTERM, SIGUSR1, SIGINT}) {
      signal(number, SIG_DFL);  // Catch2 has its own handlers
    }
    const int code = body();
    std::fflush(nullptr);
    _exit(code);
  }
  close(ends[1]);
  return {pid, ends[0]};
}

inline Ended end_of(const Running& running) {
  Ended ended;
  char buffer[4096];
  for (ssize_t size = 0; (size = read(running.output, buffer, sizeof(buffer))) > 0;) {
    ended.output.append(buffer, static_cast<std::size_t>(size));
  }
  close(running.output);
  waitpid(running.pid, &ended.status, 0);
  return ended;
}

/// Returns the output up to the buffer that ends with or holds `text`, or all output without it.
inline std::string output_until(const Running& running, const std::string& text) {
  std::string output;
  char buffer[4096];
  while (output.find(text) == std::string::npos) {
    const ssize_t size = read(running.output, buffer, sizeof(buffer));
    if (size <= 0) {
      break;
    }
    output.append(buffer, static_cast<std::size_t>(size));
  }
  return output;
}

inline Running start_program(const ddp::RunFunction& function,
                             std::vector<std::string> arguments = {},
                             const std::vector<ddp::Section>& sections = {}) {
  std::vector<const char*> words{"program", "context.device=cpu"};
  for (const auto& argument : arguments) {
    words.push_back(argument.c_str());
  }
  return start_child(
      [&] { return ddp::run(static_cast<int>(words.size()), words.data(), function, sections); });
}

inline Ended run_program(const ddp::RunFunction& function,
                         const std::vector<std::string>& arguments = {},
                         const std::vector<ddp::Section>& sections = {}) {
  return end_of(start_program(function, arguments, sections));
}

}  // namespace testing
