// SPDX-License-Identifier: Apache-2.0
#include "core/event_loop.hpp"

#include <exception>

namespace ddp::detail {

void EventLoop::start() {
  const std::lock_guard lock(mutex_);  // run() locks it first, so is_current_thread() is right
  thread_ = std::thread([this] {
    try {
      run();
    } catch (const std::exception& error) {
      handler_.end_by_exception(error.what());
    }
  });
}

void EventLoop::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    wake_.notify();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

void EventLoop::run() {
  std::vector<pollfd> watched;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    watched.assign(1, pollfd{wake_.fd(), POLLIN, 0});
    const auto timeout = handler_.prepare(watched);
    lock.unlock();
    poll(watched.data(), watched.size(), static_cast<int>(timeout.count()));
    lock.lock();
    wake_.drain();
    handler_.serve(lock, watched, std::chrono::steady_clock::now());
  }
}

}  // namespace ddp::detail
