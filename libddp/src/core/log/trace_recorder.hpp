// SPDX-License-Identifier: Apache-2.0
// Time spans for the Chrome/Perfetto trace and for NVTX, by name and track.
//
// Cost when not recording: one relaxed atomic load. Any thread may record.
//
//   void Optimizer::step() {
//     ddp::TraceScope trace("optimizer", "compute");
//     …
//   }
//
// On CUDA a scope records its host span and, if a TraceDevice is installed, the span of its
// kernels. Use marks for work on another stream:
//
//   if (auto* recorder = ddp::TraceRecorder::active()) {
//     begin = recorder->mark(stream); …; recorder->add_marked("bucket 3", "reduction", begin,
//                                                             recorder->mark(stream));
//   }
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/detail/trace_scope.hpp"

namespace ddp {

/// One finished span. Times are nanoseconds of this host's steady clock.
struct TraceEvent {
  std::string name;
  std::string track;  ///< "compute", "reduction", "optimizer", "loader", … one line in the viewer
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int64_t step = -1;
};

/// The device's own clock (CUDA events). The recorder itself needs neither LibTorch nor CUDA.
class TraceDevice {
 public:
  virtual ~TraceDevice() = default;
  /// Records "now" on `stream` (nullptr: the calling thread's current stream). Never waits.
  virtual uint64_t mark(void* stream) = 0;
  /// Returns the steady-clock time of a mark. Waits for the device.
  virtual int64_t resolve_ns(uint64_t mark) = 0;
};

/// Callbacks for open spans, such as NVTX. `start` returns a nonzero number. Another thread may
/// call `end`. Functions must not throw.
struct RangeHooks {
  uint64_t (*start)(const char* name) = nullptr;
  void (*end)(uint64_t range) = nullptr;
};

class TraceRecorder {
 public:
  /// Keeps at most `max_events` events; later ones are counted as dropped.
  explicit TraceRecorder(std::size_t max_events = 1'000'000);
  ~TraceRecorder();
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;

  /// Steady-clock nanoseconds, the time base of every event.
  static int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  static int64_t to_ns(std::chrono::steady_clock::time_point time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
  }

  /// The active recorder of this process, or nullptr. It is global because it cannot be passed
  /// through every constructor. The pointer is valid until its owner destroys it, after all
  /// recording threads have ended.
  static TraceRecorder* active() { return active_.load(std::memory_order_acquire); }

  /// Starts and stops recording here. Starting replaces another active recorder.
  void start();
  void stop();

  void set_device(std::shared_ptr<TraceDevice> device);
  /// Sets the step of later events.
  void set_step(int64_t step) { step_.store(step, std::memory_order_relaxed); }

  void add(std::string_view name, std::string_view track, int64_t begin_ns, int64_t end_ns);
  /// Returns 0 without a device.
  uint64_t mark(void* stream = nullptr);
  /// Adds a span between two marks; take() resolves it. Ignored if a mark is 0.
  void add_marked(std::string_view name, std::string_view track, uint64_t begin, uint64_t end);

  /// Returns all events so far, ordered by begin, and empties the recorder. Resolving marks waits
  /// for the device.
  std::vector<TraceEvent> take();
  std::size_t num_dropped() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  struct MarkedSpan {
    TraceEvent event;
    uint64_t begin;
    uint64_t end;
  };
  bool reserve_place();

  static std::atomic<TraceRecorder*> active_;
  const std::size_t max_events_;
  std::atomic<int64_t> step_{-1};
  std::atomic<std::size_t> dropped_{0};
  std::mutex mutex_;
  std::vector<TraceEvent> events_;
  std::vector<MarkedSpan> marked_;
  std::shared_ptr<TraceDevice> device_;
};

/// Sends later ranges to `hooks`; members that are nullptr disable them. Call this once, before
/// threads start.
void set_range_hooks(const RangeHooks& hooks);

}  // namespace ddp
