// SPDX-License-Identifier: Apache-2.0
#include "core/control/plane_service.hpp"

#include <algorithm>
#include <exception>
#include <utility>

#include "core/launch/report_signal.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {

void EventLoop::start() {
  const std::lock_guard lock(mutex_);  // run() waits for it, so is_current_thread() is right
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
  if (is_current_thread()) {
    thread_.detach();  // this thread runs exit() and does not return to run()
  } else if (thread_.joinable()) {
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

std::chrono::milliseconds PlaneService::prepare(std::vector<pollfd>& watched) {
  link_.add_sockets(watched);
  // A few checks per heartbeat interval are exact enough for every limit.
  const auto timeout = std::clamp(state_.options.heartbeat_interval / 4,
                                  std::chrono::milliseconds(2), std::chrono::milliseconds(250));
  if (const auto due = state_.progress.due()) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(*due - std::chrono::steady_clock::now());
    return std::clamp(left, std::chrono::milliseconds(0), timeout);
  }
  return timeout;
}

void PlaneService::serve(std::unique_lock<std::mutex>& lock, const std::vector<pollfd>& watched,
                         SteadyTime steady) {
  const auto now = state_.monitor.tick(steady);
  if (const auto progress = state_.progress.take_due(steady)) {
    link_.send_progress(*progress);
  }
  if (const auto position = state_.position.poll(steady)) {
    link_.send_position(*position);
  }
  if (take_report_request()) {
    link_.request_report();
  }
  link_.serve(watched, now);
  report_failure(lock);
  if (auto report = link_.take_report()) {
    reports_.publish(*std::move(report));
  }
}

void PlaneService::report_failure(std::unique_lock<std::mutex>& lock) {
  auto& failure = state_.monitor.failure();
  if (failure.failed() && !failure.callbacks_ran()) {
    log_first_cause();  // before any waiter can wake, throw, and end the process
    lock.unlock();
    failure.run_callbacks();
    lock.lock();
  }
}

// Nothing serves the connections any more, so peers receive only the bytes that sockets take now.
void PlaneService::end_by_exception(const std::string& what) {
  FailureCause cause;
  cause.message = concat("the control plane's thread ended by an exception: ", what);
  cause.exit_code = ExitCode::UserException;
  cause = state_.complete(std::move(cause));
  {
    const auto lock = state_.monitor.lock();
    try {
      link_.send_failure(cause);
    } catch (const std::exception& error) {
      log_error(concat("control plane: peers were not notified: ", error.what()));
    }
    state_.monitor.set_failure(cause, /*found_here=*/true);
    log_first_cause();
  }
  state_.monitor.failure().run_callbacks();
}

void PlaneService::log_first_cause() const {
  if (state_.monitor.found_failure_here() || state_.membership.rank == 0) {
    log_error("first cause: " + state_.monitor.first_cause().to_line());
  }
}

}  // namespace ddp::detail
