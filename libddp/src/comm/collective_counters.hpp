// SPDX-License-Identifier: Apache-2.0
// How far the collectives of one communicator came, written by the GPU into mapped host memory, so
// that the watchdog reads them without a CUDA call.
//
// Eager collectives: the host counts what it launched; a mark on the stream writes that number. A
// mark costs about 1 us on the stream, so that many small collectives in a row share one: there is
// a mark behind a launch when the last one is a millisecond old, and behind the newest launch when
// somebody waits for a work, asks for it or drops it. What no mark follows is not watched.
//
// Captured collectives: each graph has counters of its own, which count again in every replay. The
// first collective of a capture is preceded by "a replay started", since the host does not see
// replays. Their end is counted when somebody waits for the newest of them, which a capture must
// do before it ends, on a branch of its own: the chain of collectives is not made longer by it.
#pragma once

#include <c10/core/ScalarType.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "comm/watchdog_core.hpp"
#include "core/rank_position.hpp"
#include "core/revocable_probe.hpp"
#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

/// What a collective was, for messages. Small: one is kept for each of the latest.
struct CollectiveRecord {
  const char* name = "";
  int64_t sequence = 0;
  int64_t num_elements = 0;
  int64_t num_bytes = 0;
  c10::ScalarType dtype = c10::kByte;

  std::string to_string() const;
};

class CollectiveCounters {
 public:
  /// On the current device. `stream` is where the collectives run; `counter_stream` joins captures.
  CollectiveCounters(cudaStream_t stream, cudaStream_t counter_stream);
  ~CollectiveCounters();
  CollectiveCounters(const CollectiveCounters&) = delete;
  CollectiveCounters& operator=(const CollectiveCounters&) = delete;

  /// Before the launch: from now on these count as enqueued. One launch at a time.
  void begin_eager(std::span<const CollectiveRecord> collectives);
  /// After it. Returns the number of this launch.
  int64_t end_eager();
  /// Instead of it, where the launch threw: nothing of it is waited for.
  void cancel_eager();
  /// A mark behind the newest eager launch, unless there is one. Any thread, not in a capture.
  void mark_eager();
  /// The same without a lock where nothing is due. Another thread may be writing the mark still.
  void mark_when_due() {
    if (mark_is_due_.load(std::memory_order_acquire)) {
      mark_eager();
    }
  }

  /// Before a captured launch, `id` being the capture's: for its first one the counter stream joins
  /// the capture through `ready`, an event recorded in it, and counts a replay's start.
  void begin_captured(unsigned long long id, cudaEvent_t ready);
  /// After it. Returns the number of this launch.
  int64_t end_captured(std::span<const CollectiveRecord> collectives);
  /// `launch` being the newest: counts the ends of all that are not counted yet behind `ended`, on
  /// the counter stream, which then has to be joined. False, and nothing done, if it is not.
  bool count_captured(int64_t launch, cudaEvent_t ended);
  /// See OperationLog.
  void hold_counts();
  /// Whether the counter stream, whose last count was just captured, is to be joined later.
  bool hold_count();
  /// Whether it is to be joined now. Ends what hold_counts() began.
  bool release_counts();
  cudaStream_t counter_stream() const { return counter_stream_; }
  /// See OperationLog.
  std::vector<std::string> captured_operations(int64_t after) const;

  /// The device may hang from now on: its memory is never freed.
  void abandon() { abandoned_ = true; }

  /// Any thread. Lane 0 is the eager one, then one a captured graph.
  std::vector<LaneProgress> lanes() const;
  /// The collective that did not end, and which counter stands.
  std::string describe(const Stall& stall) const;
  /// Where this rank stands with the eager ones, and without an id. A communicator that was
  /// captured looks as if it were never behind: what its graphs replay, the host does not count.
  /// The probe may outlive the counters and owns no CUDA memory.
  std::shared_ptr<RevocableProbe> position_probe() const { return position_probe_; }

 private:
  static constexpr size_t kMaxGraphs = 1024;
  static constexpr size_t kRecords = 1024;  // of eager collectives

  static constexpr std::chrono::milliseconds kMarkInterval{1};

  struct Graph {
    unsigned long long capture_id = 0;
    std::vector<CollectiveRecord> records;
    std::vector<size_t> counted;  // how many of them each count stands behind, ascending
  };
  // Device totals and what the host sees of them, in the same places: 0 the eager end, then two a
  // graph: replays started, collectives ended.
  static constexpr size_t kNumCounters = 1 + 2 * kMaxGraphs;
  static size_t started_of(size_t graph) { return 1 + 2 * graph; }
  static size_t ended_of(size_t graph) { return 2 + 2 * graph; }
  uint32_t read(size_t counter) const;
  GroupPosition position() const;
  uint64_t num_eager() const;
  uint64_t last_before_mark(uint64_t first, uint64_t end) const;
  void write_mark(uint32_t value);

  int device_ = 0;
  const cudaStream_t stream_;
  const cudaStream_t counter_stream_;
  uint32_t* totals_ = nullptr;   // device
  uint32_t* shown_ = nullptr;    // mapped host memory
  void* write_value_ = nullptr;  // cuStreamWriteValue32, null where the driver has none
  std::atomic<bool> abandoned_{false};
  std::atomic<bool> mark_is_due_{false};  // eager_marked_ != eager_ended_
  std::mutex mark_mutex_;      // the order of marks; held in a CUDA call, so never the watchdog's
  mutable std::mutex mutex_;   // all below
  int64_t launches_ = 0;       // eager and captured
  bool holds_counts_ = false;  // of a capture
  bool count_is_held_ = false;
  uint64_t eager_begun_ = 0;   // collectives
  uint64_t eager_ended_ = 0;   // launched; fewer than begun while NCCL launches
  uint64_t eager_marked_ = 0;  // a mark follows, or is just being written
  uint64_t num_of_all_ = 0;    // eager ones but send and recv, which not all ranks call
  std::chrono::steady_clock::time_point last_mark_{};
  std::array<CollectiveRecord, kRecords> eager_records_{};
  std::array<uint64_t, kRecords> numbers_of_all_{};  // 0: send or recv
  std::array<bool, kRecords> mark_follows_{};
  std::vector<Graph> graphs_;
  const std::shared_ptr<RevocableProbe> position_probe_ =
      std::make_shared<RevocableProbe>([this] { return position(); });
};

}  // namespace ddp::detail
