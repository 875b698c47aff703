// SPDX-License-Identifier: Apache-2.0
// A named pipe in the place of a file.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

namespace testing {

/// Opens the pipe to write after one second if a reader is blocked, so that the test fails instead
/// of hanging.
class NamedPipe {
 public:
  explicit NamedPipe(std::string path) : path_(std::move(path)) {
    unlink(path_.c_str());
    if (mkfifo(path_.c_str(), 0600) != 0) {
      throw std::runtime_error("cannot make the named pipe " + path_);
    }
    helper_ = std::thread([this] {
      for (int waited_ms = 0; !done_; waited_ms += 10) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        const int fd =
            waited_ms < 1000 ? -1 : open(path_.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC);
        if (fd >= 0) {
          was_waited_for_ = true;
          close(fd);
        }
      }
    });
  }
  ~NamedPipe() {
    done_ = true;
    helper_.join();
    unlink(path_.c_str());
  }
  NamedPipe(const NamedPipe&) = delete;
  NamedPipe& operator=(const NamedPipe&) = delete;

  const std::string& path() const { return path_; }
  /// True if a reader was waiting for a writer.
  bool was_waited_for() const { return was_waited_for_; }

 private:
  const std::string path_;
  std::atomic<bool> done_{false}, was_waited_for_{false};
  std::thread helper_;
};

}  // namespace testing
