// SPDX-License-Identifier: Apache-2.0
// Threads for work in the background: single tasks, or one repeated task. Torch-free.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <future>
#include <mutex>
#include <stop_token>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "ddp/detail/check.hpp"

namespace ddp::detail {

/// Runs one task at a time on another thread. The destructor waits for a running task.
class BackgroundTask {
 public:
  /// Must not be called while a task runs. If no thread can be made, the task has failed.
  void start(std::function<void()> task) {
    DDP_CHECK(!running());
    try {
      error_ = std::async(std::launch::async, [task = std::move(task)]() mutable {
        return error_of(std::exchange(task, nullptr));
      });
    } catch (const std::system_error& no_thread) {
      std::promise<std::string> failed;
      failed.set_value(no_thread.what());
      error_ = failed.get_future();
    }
  }
  bool running() const {
    return error_.valid() && error_.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
  }
  void wait() const {
    if (error_.valid()) {
      error_.wait();
    }
  }
  /// Why the last task failed; empty if it succeeded. Call when no task runs.
  std::string error() const { return error_.valid() ? error_.get() : ""; }

 private:
  // Frees what the task holds before waiters are notified.
  static std::string error_of(const std::function<void()> task) {
    try {
      task();
    } catch (const std::exception& failure) {
      return failure.what();
    } catch (...) {
      return "unknown exception";
    }
    return "";
  }

  std::shared_future<std::string> error_;
};

/// Repeats one task on another thread. The destructor waits for a running task.
class PeriodicTask {
 public:
  /// `task` must not throw. It runs for the first time after one `period`.
  PeriodicTask(std::function<void()> task, std::chrono::milliseconds period)
      : thread_([task = std::move(task), period](const std::stop_token& stop) {
          std::mutex mutex;
          std::condition_variable_any wake;
          std::unique_lock lock(mutex);
          while (!wake.wait_for(lock, stop, period, [&] { return stop.stop_requested(); })) {
            task();
          }
        }) {}

 private:
  std::jthread thread_;
};

}  // namespace ddp::detail
