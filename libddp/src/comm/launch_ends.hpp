// SPDX-License-Identifier: Apache-2.0
// Events at the ends of one communicator's launches, for waiters. Free of LibTorch and CUDA.
//
// An event and a wait for every launch would cost a small collective a tenth of its time. So
// consecutive small ones share an event, recorded at the first wait or query. A stream that already
// waited for a later launch does not wait again:
//
//   launches   1   2   3   4 ──┬── 5            wait for 2: recorded here, behind 4
//                          event             wait for 1, 3, 4 on the same stream: nothing to do
//
// An event may stand behind more launches than the requested one, never behind fewer. The excess is
// bounded: at most kMostTogether launches share an event, and close() ends a row before any launch
// that may take long.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace ddp::detail {

/// Any thread may query and wait; one thread launches at a time. An empty `Event` is false.
template <typename Event>
class LaunchEnds {
  struct End {
    Event event;         // empty: not recorded yet
    int64_t covers = 0;  // the newest launch surely before the event
  };

 public:
  static constexpr int kMostTogether = 32;

  /// A launch, which keeps its event alive.
  struct Launch {
    std::shared_ptr<End> end;
    int64_t number = 0;
    explicit operator bool() const { return end != nullptr; }
  };

  /// `record()` returns an event behind all launches so far.
  explicit LaunchEnds(std::function<Event()> record) : record_(std::move(record)) {}

  /// Call after each launch. If `shares`, the event may be recorded later. Otherwise it is recorded
  /// now, and close() must precede the launch.
  Launch launched(bool shares) {
    const std::lock_guard lock(mutex_);
    if (open_ == nullptr) {
      open_ = std::make_shared<End>();
      num_open_ = 0;
    }
    Launch launch{open_, ++newest_};
    if (!shares || ++num_open_ >= kMostTogether) {
      record(*launch.end);
    }
    return launch;
  }

  /// Call before a launch that the row's waiters must not wait for, and before the stream is
  /// captured.
  void close() {
    const std::lock_guard lock(mutex_);
    if (const auto end = open_) {
      record(*end);
    }
  }

  /// The event of `launch`, recorded now if necessary.
  const Event& event_of(const Launch& launch) {
    const std::lock_guard lock(mutex_);
    return recorded(*launch.end);
  }

  /// Calls `wait(event)` unless stream number `stream` already waited for this or a later launch.
  /// `wait` makes the stream wait. Stream 0 is unknown and always waits.
  template <typename Wait>
  void join(const Launch& launch, uint64_t stream, const Wait& wait) {
    const std::lock_guard lock(mutex_);
    if (stream != 0 && stream == joined_stream_ && launch.number <= joined_launch_) {
      return;
    }
    wait(recorded(*launch.end));
    joined_stream_ = stream;
    joined_launch_ = launch.end->covers;
  }

 private:
  const Event& recorded(End& end) {
    if (!end.event) {
      record(end);
    }
    return end.event;
  }
  // An unrecorded end belongs to the open row.
  void record(End& end) {
    end.event = record_();
    end.covers = newest_;
    open_ = nullptr;
  }

  const std::function<Event()> record_;
  std::mutex mutex_;           // guards all below
  std::shared_ptr<End> open_;  // the newest launches, until their event is recorded
  int num_open_ = 0;
  int64_t newest_ = 0;  // launch numbers
  int64_t joined_launch_ = 0;
  uint64_t joined_stream_ = 0;  // the last stream that waited
};

}  // namespace ddp::detail
