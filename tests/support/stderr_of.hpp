// SPDX-License-Identifier: Apache-2.0
// What a program tells on standard error, where the log goes.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace testing {

/// Standard error goes into a file without a name as long as this lives.
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

  /// What was written up to here.
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

/// What is written to standard error while `function` runs, by any thread of this process.
template <typename F>
std::string stderr_of(F&& function) {
  const RedirectedStderr redirected;
  function();
  return redirected.text();
}

/// How often `part` is found in `text`.
inline int num_found(const std::string& text, const std::string& part) {
  int num = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) {
    ++num;
  }
  return num;
}

}  // namespace testing
