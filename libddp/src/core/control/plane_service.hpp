// SPDX-License-Identifier: Apache-2.0
// The background side of a control plane: a thread that polls sockets and serves the link.
#pragma once

#include <poll.h>

#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/control/control_link.hpp"
#include "core/control/doctor/report_writer.hpp"
#include "core/control/wire/tcp_socket.hpp"

namespace ddp::detail {

/// A thread that polls sockets and serves them under its owner's mutex.
class EventLoop {
 public:
  class Handler {
   public:
    virtual ~Handler() = default;
    /// Appends the sockets to poll. Returns how long to wait for them. The mutex is held.
    virtual std::chrono::milliseconds prepare(std::vector<pollfd>& watched) = 0;
    /// `watched` is poll()'s result, in the order of prepare(). The mutex is held; `lock` may be
    /// unlocked for a while. `steady` is the time at which this turn began.
    virtual void serve(std::unique_lock<std::mutex>& lock, const std::vector<pollfd>& watched,
                       SteadyTime steady) = 0;
    /// The thread ended by an exception of the functions above. The mutex is not held.
    virtual void end_by_exception(const std::string& what) = 0;
  };

  /// `wake` ends a poll early, from any thread.
  EventLoop(std::mutex& mutex, WakeEvent& wake, Handler& handler)
      : mutex_(mutex), wake_(wake), handler_(handler) {}
  ~EventLoop() { stop(); }
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  void start();
  /// Returns after the thread has ended.
  void stop();
  bool is_current_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  void run();

  std::mutex& mutex_;
  WakeEvent& wake_;
  Handler& handler_;
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;
};

/// Serves the link, sends progress and positions, and runs the failure callbacks.
class PlaneService final : public EventLoop::Handler {
 public:
  PlaneService(RankState& state, ControlLink& link) : state_(state), link_(link) {}

  std::chrono::milliseconds prepare(std::vector<pollfd>& watched) override;
  void serve(std::unique_lock<std::mutex>& lock, const std::vector<pollfd>& watched,
             SteadyTime steady) override;
  void end_by_exception(const std::string& what) override;
  /// Logs a failure and runs its callbacks, once. The mutex is held; `lock` is unlocked meanwhile.
  void report_failure(std::unique_lock<std::mutex>& lock);

 private:
  void log_first_cause() const;

  RankState& state_;
  ControlLink& link_;
  ReportWriter reports_;
};

}  // namespace ddp::detail
