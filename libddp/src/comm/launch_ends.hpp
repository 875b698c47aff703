// SPDX-License-Identifier: Apache-2.0
// Where the launches of one communicator end, for those who wait for them. Free of LibTorch and
// CUDA.
//
// Recording an event behind every launch and waiting for each costs a small collective a tenth of
// its time. So small ones in a row share an event, recorded when somebody first waits for or asks
// one of them, and a stream that waited for a later launch waits no more:
//
//   launches   1   2   3   4 ──┬── 5            wait for 2: recorded here, behind 4
//                          event             wait for 1, 3, 4 on the same stream: nothing to do
//
// Later is only later: an event may stand behind more launches than the one it is asked for, never
// behind fewer. How much later is bounded: at most kMostTogether launches share an event, and
// close() ends a row before anything that may take long.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace ddp::detail {

/// Any thread may ask and wait; one launches at a time. `Event` is movable and false when empty.
template <typename Event>
class LaunchEnds {
  struct End {
    Event event;         // empty: not recorded yet
    int64_t covers = 0;  // the newest launch it stands behind for certain
  };

 public:
  static constexpr int kMostTogether = 32;

  /// One launch; keeps its event.
  struct Launch {
    std::shared_ptr<End> end;
    int64_t number = 0;
    explicit operator bool() const { return end != nullptr; }
  };

  /// `record()`: an event behind all that was launched so far.
  explicit LaunchEnds(std::function<Event()> record) : record_(std::move(record)) {}

  /// Something was just launched. `shares`: its event may come later; else it is recorded now, and
  /// close() was called before the launch.
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

  /// Before a launch that nobody of the row shall wait for, and before the stream joins a capture.
  void close() {
    const std::lock_guard lock(mutex_);
    if (const auto end = open_) {
      record(*end);
    }
  }

  /// The event of `launch`, recorded now if it was not.
  const Event& event_of(const Launch& launch) {
    const std::lock_guard lock(mutex_);
    return recorded(*launch.end);
  }

  /// `wait(event)` makes the stream numbered `stream` wait; not called where it waited for this
  /// launch or a later one. 0: a stream of unknown number, which always waits.
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
  // What is not recorded is the open row.
  void record(End& end) {
    end.event = record_();
    end.covers = newest_;
    open_ = nullptr;
  }

  const std::function<Event()> record_;
  std::mutex mutex_;           // all below
  std::shared_ptr<End> open_;  // of the newest launches, while their event is not recorded
  int num_open_ = 0;
  int64_t newest_ = 0;  // numbers of launches
  int64_t joined_launch_ = 0;
  uint64_t joined_stream_ = 0;  // which stream waited last
};

}  // namespace ddp::detail
