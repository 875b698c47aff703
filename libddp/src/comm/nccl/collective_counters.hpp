// SPDX-License-Identifier: Apache-2.0
// Progress of one communicator's collectives. The GPU writes it into mapped host memory, where the
// watchdog reads it without a CUDA call.
//
// Eager collectives: the host counts its launches; a mark on the stream writes that count. A mark
// costs about 1 us, so consecutive small collectives share one. A mark follows a launch if the last
// mark is 1 ms old. A mark also follows the newest launch when a work is waited for, queried or
// dropped. Collectives without a later mark are not watched.
//
// Captured collectives: each graph has its own counters, which count again in every replay. The
// host does not see replays, so a counter before the first collective counts started replays.
// A capture that waits for its newest collective adds kernels that count all ends so far. Every
// capture must do that before it ends. These kernels are a separate branch of the graph, so they
// do not delay the collectives.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "comm/nccl/collective_progress.hpp"
#include "comm/nccl/counter_memory.hpp"
#include "comm/watchdog.hpp"
#include "core/control/rank_position.hpp"

namespace ddp::detail {

class CollectiveCounters {
 public:
  /// Uses the current device. Collectives run on `stream`; `counter_stream` joins captures.
  CollectiveCounters(cudaStream_t stream, cudaStream_t counter_stream);
  ~CollectiveCounters();
  CollectiveCounters(const CollectiveCounters&) = delete;
  CollectiveCounters& operator=(const CollectiveCounters&) = delete;

  /// Call before a launch: `collectives` count as enqueued from now on. One launch at a time.
  void begin_eager(std::span<const CollectiveRecord> collectives) { eager_.begin(collectives); }
  /// Call after the launch. Returns its number.
  int64_t end_eager();
  /// Replaces end_eager() if the launch threw: its collectives are not watched.
  void cancel_eager() { eager_.cancel(); }
  /// Enqueues a mark behind the newest eager launch unless one exists. Any thread; not in a
  /// capture.
  void mark_eager();
  /// Like mark_eager(), without a lock if no mark is due. Another thread may still be writing it.
  void mark_when_due() {
    if (eager_.mark_is_due()) {
      mark_eager();
    }
  }

  /// Call before a captured launch; `id` identifies the capture. The first launch of a capture
  /// joins the counter stream through `ready`, an event recorded in it, and counts a replay's
  /// start.
  void begin_captured(unsigned long long id, cudaEvent_t ready);
  /// Call after the launch. Returns its number.
  int64_t end_captured(std::span<const CollectiveRecord> collectives) {
    return captured_.end(collectives);
  }
  /// Counts all uncounted ends behind `ended` on the counter stream, which must then be joined.
  /// Does nothing and returns false unless `launch` is the newest.
  bool count_captured(int64_t launch, cudaEvent_t ended);
  /// See CapturedCollectives.
  void hold_counts() { captured_.hold_counts(); }
  bool hold_count() { return captured_.hold_count(); }
  bool release_counts() { return captured_.release_counts(); }
  cudaStream_t counter_stream() const { return counter_stream_; }

  /// Call if the device may hang. The memory is then never freed.
  void abandon() { memory_.abandon(); }

  /// Any thread. Lane 0 is the eager lane; one lane per captured graph follows.
  std::vector<LaneProgress> lanes() const;
  /// The collective that did not end, and the counter that stopped.
  std::string describe(const Stall& stall) const;
  /// This rank's position in the eager collectives, without an id. The host does not count replays,
  /// so a captured communicator never appears behind. The source owns no CUDA memory and may
  /// outlive the counters.
  std::shared_ptr<PositionSource> position_source() const { return position_source_; }

 private:
  // Counter 0 counts eager ends. Those of the graphs follow.
  static constexpr size_t kFirstOfGraphs = 1;
  GroupPosition position();
  GroupHistory history() { return {eager_.history(), captured_.history(), captured_.num_ended()}; }

  const cudaStream_t stream_;
  const cudaStream_t counter_stream_;
  CounterMemory memory_;
  EagerCollectives eager_;
  CapturedCollectives captured_;
  std::mutex mark_mutex_;  // orders the marks; held in CUDA calls, so the watchdog never locks it
  const std::shared_ptr<PositionSource> position_source_ =
      std::make_shared<PositionSource>([this] { return position(); }, [this] { return history(); });
};

}  // namespace ddp::detail
