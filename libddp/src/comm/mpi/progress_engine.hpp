// SPDX-License-Identifier: Apache-2.0
// A thread that executes operations while callers compute.
//
//   submit ──> queue ──> start() in order of submission ──> poll() until true ──> ticket finished
//                              │                                │
//                              └── throws: this one fails ──────┴── throws or is late: this one
//                              fails
//
// Each operation belongs to a lane (one per communicator). abort(lane) finishes every ticket of the
// lane at once, even while the thread blocks in a call. Aborted operations are never freed, because
// the backend may still write into their memory.
//
// Between polls the thread sleeps for growing times, so that ranks that share cores do not starve.
// Free of LibTorch and MPI: the thread sanitizer runs it without suppressions.
#pragma once

#if defined(__linux__)
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "core/control/running_clock.hpp"

namespace ddp::detail {

/// Keeps `object` reachable until the process ends, so leak checkers ignore it.
inline void keep_until_exit(std::shared_ptr<void> object) {
  static std::mutex mutex;
  static auto* kept = new std::vector<std::shared_ptr<void>>;
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(object));
}

/// Completion of one operation, for waiters.
class ProgressTicket {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  struct Times {
    TimePoint submitted, started, finished;  ///< the clock's epoch: not yet
    bool failed = false;                     ///< or aborted
  };

  explicit ProgressTicket(std::shared_ptr<std::atomic<int>> num_waiters)
      : num_waiters_(std::move(num_waiters)) {}

  /// The host waits. Throws the operation's error.
  void wait() {
    std::unique_lock lock(mutex_);
    if (!finished_) {
      ++*num_waiters_;
      ++num_waiting_;
      changed_.wait(lock, [this] { return finished_; });
      --num_waiting_;
      --*num_waiters_;
    }
    rethrow();
  }
  /// Returns false if the operation did not end within `timeout`.
  bool wait_for(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    if (!finished_) {
      ++*num_waiters_;
      changed_.wait_for(lock, timeout, [this] { return finished_; });
      --*num_waiters_;
    }
    if (finished_) {
      rethrow();
    }
    return finished_;
  }
  bool is_finished() {
    const std::lock_guard lock(mutex_);
    return finished_;
  }
  /// Whether a thread is in wait(). wait_for() does not count, since its timeout ends it.
  bool is_waited_for() {
    const std::lock_guard lock(mutex_);
    return num_waiting_ > 0;
  }
  Times times() {
    const std::lock_guard lock(mutex_);
    return times_;
  }
  void mark_started() {
    const std::lock_guard lock(mutex_);
    times_.started = std::chrono::steady_clock::now();
  }
  /// Only the first call counts. Returns whether this was the first.
  bool finish(std::exception_ptr error) {
    {
      const std::lock_guard lock(mutex_);
      if (finished_) {
        return false;
      }
      finished_ = true;
      times_.finished = std::chrono::steady_clock::now();
      times_.failed = error != nullptr;
      error_ = std::move(error);
    }
    changed_.notify_all();
    return true;
  }

 private:
  void rethrow() const {
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool finished_ = false;
  int num_waiting_ = 0;
  Times times_{.submitted = std::chrono::steady_clock::now(), .started = {}, .finished = {}};
  std::exception_ptr error_;
  std::shared_ptr<std::atomic<int>> num_waiters_;
};

struct ProgressOptions {
  std::chrono::microseconds min_sleep{20};
  std::chrono::microseconds max_sleep{200};
  std::chrono::microseconds max_sleep_waited{50};  ///< while a thread waits for a ticket
  std::chrono::milliseconds longest_turn{1000};    ///< a longer turn of the thread counts as this
};

/// Operation has these members, called on the engine's thread. `void start()` and `bool poll()`.
/// `std::chrono::milliseconds timeout() const`: limit from the start by RunningClock; 0: none.
/// `std::exception_ptr timed_out() const`. `void failed(std::exception_ptr)`: called once if the
/// operation failed, not for an abort.
template <typename Operation>
class ProgressEngine {
 public:
  using Ticket = ProgressTicket;
  using TicketPtr = std::shared_ptr<Ticket>;
  using OperationPtr = std::shared_ptr<Operation>;

  class Lane {
   private:
    friend class ProgressEngine;
    std::exception_ptr aborted;  // guarded by the engine's mutex, like `pending`
    std::set<TicketPtr> pending;
  };
  using LanePtr = std::shared_ptr<Lane>;

  explicit ProgressEngine(const ProgressOptions& options = {})
      : core_(std::make_shared<Core>(options)), thread_([core = core_] { core->run(); }) {}
  ProgressEngine(const ProgressEngine&) = delete;
  ProgressEngine& operator=(const ProgressEngine&) = delete;
  ~ProgressEngine() { stop(std::chrono::seconds(10)); }

  LanePtr make_lane() { return std::make_shared<Lane>(); }

  /// Any thread. Throws the abort reason after abort(lane).
  TicketPtr submit(const LanePtr& lane, OperationPtr operation) {
    auto ticket = std::make_shared<Ticket>(core_->num_waiters);
    {
      const std::lock_guard lock(core_->mutex);
      if (lane->aborted) {
        std::rethrow_exception(lane->aborted);
      }
      if (core_->stopping) {
        throw std::logic_error("an operation was submitted to a progress engine that was stopped");
      }
      lane->pending.insert(ticket);
      core_->queue.push_back({std::move(operation), lane, ticket, {}});
    }
    core_->changed.notify_one();
    return ticket;
  }

  /// Any thread, idempotent: the first reason counts.
  void abort(const LanePtr& lane, std::exception_ptr reason) {
    core_->abort(lane, std::move(reason));
  }

  /// Throws the abort reason after abort(lane).
  void check(const LanePtr& lane) const {
    const std::lock_guard lock(core_->mutex);
    if (lane->aborted) {
      std::rethrow_exception(lane->aborted);
    }
  }

  /// Ends the thread after all operations have ended; first abort lanes that may not end. Returns
  /// false if the thread does not end within `bound` because a call blocks. The thread is then
  /// detached.
  bool stop(std::chrono::milliseconds bound) {
    if (!thread_.joinable()) {
      return true;
    }
    std::unique_lock lock(core_->mutex);
    core_->stopping = true;
    core_->changed.notify_all();
    const bool ended = core_->ended_changed.wait_for(lock, bound, [this] { return core_->ended; });
    lock.unlock();
    if (ended) {
      thread_.join();
    } else {
      thread_.detach();
    }
    return ended;
  }

 private:
  struct Entry {
    OperationPtr operation;
    LanePtr lane;
    TicketPtr ticket;
    std::chrono::steady_clock::time_point deadline;
  };

  // Outlives the engine if its thread is detached.
  struct Core {
    explicit Core(const ProgressOptions& o) : options(o), clock(o.longest_turn) {}

    void run() {
#if defined(__linux__)
      // The default slack of 50 us would more than double the shortest sleeps.
      prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0);
#endif
      auto sleep = options.min_sleep;
      std::deque<Entry> incoming;
      while (take(incoming, sleep)) {
        clock.tick(std::chrono::steady_clock::now());
        const bool started = start(incoming);
        const bool moved = poll() || started;
        sleep = moved ? options.min_sleep : std::min(sleep * 3 / 2, options.max_sleep);
        if (num_waiters->load() > 0) {
          sleep = std::min(sleep, options.max_sleep_waited);
        }
      }
      const std::lock_guard lock(mutex);
      ended = true;
      ended_changed.notify_all();
    }

    // Sleeps, then takes the queued operations. Returns false when the thread must end.
    bool take(std::deque<Entry>& incoming, std::chrono::microseconds sleep) {
      std::unique_lock lock(mutex);
      const auto due = [this] {
        return !queue.empty() || aborts > 0 || (stopping && active.empty());
      };
      if (active.empty()) {
        changed.wait(lock, due);
      } else {
        changed.wait_for(lock, sleep, due);
      }
      remove_aborted();
      incoming.swap(queue);
      return !(stopping && incoming.empty() && active.empty());
    }

    void remove_aborted() {
      if (aborts == 0) {
        return;
      }
      aborts = 0;
      for (auto entry = active.begin(); entry != active.end();) {
        if (entry->lane->aborted) {
          keep_until_exit(entry->operation);
          entry = active.erase(entry);
        } else {
          ++entry;
        }
      }
    }

    bool is_aborted(const LanePtr& lane) {
      const std::lock_guard lock(mutex);
      return lane->aborted != nullptr;
    }

    bool start(std::deque<Entry>& incoming) {
      const bool any = !incoming.empty();
      for (; !incoming.empty(); incoming.pop_front()) {
        auto& entry = incoming.front();
        if (is_aborted(entry.lane)) {
          continue;  // the abort finished its ticket; it never started, so nothing writes to it
        }
        try {
          entry.operation->start();
          entry.ticket->mark_started();
        } catch (...) {
          fail(entry, std::current_exception());
          continue;
        }
        const auto timeout = entry.operation->timeout();
        entry.deadline = timeout.count() > 0 ? clock.now() + timeout
                                             : std::chrono::steady_clock::time_point::max();
        active.push_back(std::move(entry));
      }
      return any;
    }

    bool poll() {
      bool any = false;
      // One time for all: if several are late, the error names the first submitted.
      const auto now = clock.now();
      for (auto entry = active.begin(); entry != active.end();) {
        if (poll(*entry, now)) {
          entry = active.erase(entry);
          any = true;
        } else {
          ++entry;
        }
      }
      return any;
    }

    // Returns true if the operation is no longer active.
    bool poll(Entry& entry, std::chrono::steady_clock::time_point now) {
      try {
        if (!entry.operation->poll()) {
          if (now < entry.deadline) {
            return false;
          }
          std::rethrow_exception(entry.operation->timed_out());
        }
      } catch (...) {
        fail(entry, std::current_exception());
        return true;
      }
      // Frees the operation's memory before the waiter continues, which may be its last user.
      entry.operation.reset();
      finish(entry, nullptr);
      return true;
    }

    void fail(Entry& entry, const std::exception_ptr& error) {
      keep_until_exit(entry.operation);
      if (finish(entry, error)) {
        entry.operation->failed(error);
      }
    }

    bool finish(Entry& entry, std::exception_ptr error) {
      {
        const std::lock_guard lock(mutex);
        entry.lane->pending.erase(entry.ticket);
      }
      return entry.ticket->finish(std::move(error));
    }

    void abort(const LanePtr& lane, std::exception_ptr reason) {
      std::set<TicketPtr> pending;
      {
        const std::lock_guard lock(mutex);
        if (lane->aborted) {
          return;
        }
        lane->aborted = reason;
        pending.swap(lane->pending);
        ++aborts;
      }
      for (const auto& ticket : pending) {
        ticket->finish(reason);
      }
      changed.notify_all();
    }

    const ProgressOptions options;
    const std::shared_ptr<std::atomic<int>> num_waiters = std::make_shared<std::atomic<int>>(0);
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Entry> queue;
    int aborts = 0;  // not yet seen by the thread
    bool stopping = false;
    std::condition_variable ended_changed;
    bool ended = false;
    RunningClock clock;  // used by the thread only, like the active operations
    std::list<Entry> active;
  };

  std::shared_ptr<Core> core_;
  std::thread thread_;
};

}  // namespace ddp::detail
