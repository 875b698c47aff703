// SPDX-License-Identifier: Apache-2.0
// A thread that repeats one task. Torch-free.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace ddp::detail {

class PeriodicTask {
 public:
  /// `task` must not throw. It runs for the first time after one `period`.
  PeriodicTask(std::function<void()> task, std::chrono::milliseconds period)
      : task_(std::move(task)), thread_([this, period] { run(period); }) {}
  /// Waits for a running task.
  ~PeriodicTask() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    ends_.notify_all();
    thread_.join();
  }
  PeriodicTask(const PeriodicTask&) = delete;
  PeriodicTask& operator=(const PeriodicTask&) = delete;

 private:
  void run(std::chrono::milliseconds period) {
    std::unique_lock lock(mutex_);
    while (!ends_.wait_for(lock, period, [this] { return ended_; })) {
      lock.unlock();
      task_();
      lock.lock();
    }
  }

  const std::function<void()> task_;
  std::mutex mutex_;
  std::condition_variable ends_;
  bool ended_ = false;
  std::thread thread_;  // last: it uses the members above
};

}  // namespace ddp::detail
