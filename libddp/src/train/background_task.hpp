// SPDX-License-Identifier: Apache-2.0
// A thread that runs one task at a time. Torch-free.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "ddp/detail/check.hpp"

namespace ddp::detail {

class BackgroundTask {
 public:
  BackgroundTask() : thread_([this] { run(); }) {}
  /// Waits for a running task.
  ~BackgroundTask() {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  BackgroundTask(const BackgroundTask&) = delete;
  BackgroundTask& operator=(const BackgroundTask&) = delete;

  /// Must not be called while a task runs.
  void start(std::function<void()> task) {
    {
      std::lock_guard lock(mutex_);
      DDP_CHECK(!running_);
      task_ = std::move(task);
      running_ = true;
      error_.clear();
    }
    changed_.notify_all();
  }
  bool running() const {
    std::lock_guard lock(mutex_);
    return running_;
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !running_; });
  }
  /// Why the last task failed; empty if it succeeded. Call when no task runs.
  std::string error() const {
    std::lock_guard lock(mutex_);
    return error_;
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return closing_ || running_; });
      if (!running_) {
        return;
      }
      auto task = std::move(task_);
      lock.unlock();
      std::string error;
      try {
        task();
      } catch (const std::exception& failure) {
        error = failure.what();
      } catch (...) {
        error = "unknown exception";
      }
      task = nullptr;  // frees what it holds before waiters are notified
      lock.lock();
      error_ = std::move(error);
      running_ = false;
      changed_.notify_all();
    }
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> task_;
  std::string error_;
  bool running_ = false;
  bool closing_ = false;
  std::thread thread_;  // last: it uses the members above
};

}  // namespace ddp::detail
