// SPDX-License-Identifier: Apache-2.0
// Captures a program's standard error, which receives the log.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace testing {

/// Redirects standard error to an unnamed file for its lifetime.
class RedirectedStderr {
 public:
  RedirectedStderr() : file_(std::tmpfile()) {
    if (file_ == nullptr) {
      throw std::runtime_error("no temporary file for standard error");
    }
    std::fflush(stderr);
    before_ = dup(STDERR_FILENO);
    dup2(fileno(file_), STDERR_FILENO);
  }
  ~RedirectedStderr() {
    std::fflush(stderr);
    dup2(before_, STDERR_FILENO);
    close(before_);
    std::fclose(file_);
  }
  RedirectedStderr(const RedirectedStderr&) = delete;
  RedirectedStderr& operator=(const RedirectedStderr&) = delete;

  /// Returns the text written so far.
  std::string text() const {
    std::fflush(stderr);
    std::string all;
    char part[4096];
    ssize_t size = 0;
    while ((size = pread(fileno(file_), part, sizeof(part), static_cast<off_t>(all.size()))) > 0) {
      all.append(part, static_cast<std::size_t>(size));
    }
    return all;
  }

 private:
  std::FILE* file_;
  int before_ = -1;
};

/// Returns the text that any thread writes to standard error while `function` runs.
template <typename F>
std::string stderr_of(F&& function) {
  const RedirectedStderr redirected;
  function();
  return redirected.text();
}

/// Returns the number of occurrences of `part` in `text`.
inline int num_found(const std::string& text, const std::string& part) {
  int num = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) {
    ++num;
  }
  return num;
}

}  // namespace testing
