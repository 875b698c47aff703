// SPDX-License-Identifier: Apache-2.0
// Events behind one communicator's launches, for waiters. Free of LibTorch and CUDA.
//
// An event and a wait for every launch would cost a small collective a tenth of its time. So
// consecutive small launches share an event, recorded at the first wait or query. A stream that
// already waited for a later launch does not wait again:
//
//   launches   1   2   3   4 ──┬── 5            wait for 2: recorded here, behind 4
//                            event             wait for 1, 3, 4 on the same stream: nothing to do
//
// An event may stand behind more launches than the requested one, never behind fewer. The excess is
// bounded: at most kMostShared launches share an event, and record_open() precedes any launch that
// may take long.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace ddp::detail {

/// Any thread may query and wait; one thread launches at a time. An empty `Event` is false.
template <typename Event>
class LaunchEvents {
  struct SharedEvent {
    Event event;         // empty: not recorded yet
    int64_t covers = 0;  // the newest launch surely before the event
  };

 public:
  static constexpr int kMostShared = 32;

  /// A launch, which keeps its event alive.
  struct Launch {
    std::shared_ptr<SharedEvent> event;
    int64_t number = 0;
    explicit operator bool() const { return event != nullptr; }
  };

  /// `record()` returns an event behind all launches so far.
  explicit LaunchEvents(std::function<Event()> record) : record_(std::move(record)) {}

  /// Call after each launch. If `shares_event`, the event may be recorded later. Otherwise it is
  /// recorded now, and record_open() must precede the launch.
  Launch add(bool shares_event) {
    const std::lock_guard lock(mutex_);
    if (open_ == nullptr) {
      open_ = std::make_shared<SharedEvent>();
      num_open_ = 0;
    }
    Launch launch{open_, ++newest_};
    if (!shares_event || ++num_open_ >= kMostShared) {
      record(*launch.event);
    }
    return launch;
  }

  /// Records the event of the newest launches if that was deferred. Call before a launch that their
  /// waiters must not wait for, and before the stream is captured.
  void record_open() {
    const std::lock_guard lock(mutex_);
    if (const auto open = open_) {
      record(*open);
    }
  }

  /// The event of `launch`, recorded now if necessary.
  const Event& event_of(const Launch& launch) {
    const std::lock_guard lock(mutex_);
    return recorded(*launch.event);
  }

  /// Calls `wait(event)` unless stream number `stream` already waited for this or a later launch.
  /// `wait` makes the stream wait. Stream 0 is unknown and always waits.
  template <typename Wait>
  void wait_on(uint64_t stream, const Launch& launch, const Wait& wait) {
    const std::lock_guard lock(mutex_);
    if (stream != 0 && stream == waited_stream_ && launch.number <= waited_launch_) {
      return;
    }
    wait(recorded(*launch.event));
    waited_stream_ = stream;
    waited_launch_ = launch.event->covers;
  }

 private:
  const Event& recorded(SharedEvent& shared) {
    if (!shared.event) {
      record(shared);
    }
    return shared.event;
  }
  // An unrecorded event is the open one.
  void record(SharedEvent& shared) {
    shared.event = record_();
    shared.covers = newest_;
    open_ = nullptr;
  }

  const std::function<Event()> record_;
  std::mutex mutex_;                   // guards all below
  std::shared_ptr<SharedEvent> open_;  // of the newest launches, until it is recorded
  int num_open_ = 0;
  int64_t newest_ = 0;  // launch numbers
  int64_t waited_launch_ = 0;
  uint64_t waited_stream_ = 0;  // the last stream that waited
};

}  // namespace ddp::detail
