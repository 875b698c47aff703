// SPDX-License-Identifier: Apache-2.0
// Progress of one communicator's collectives. The GPU writes it into mapped host memory, so the
// watchdog reads it without a CUDA call.
//
// Eager collectives: the host counts its launches; a mark on the stream writes that count. A mark
// costs about 1 us, so consecutive small collectives share one. A mark follows a launch if the last
// mark is 1 ms old. A mark also follows the newest launch when a work is waited for, queried or
// dropped. Collectives without a later mark are not watched.
//
// Captured collectives: each graph has its own counters, which count again in every replay. The
// host does not see replays, so a counter before the first collective counts started replays.
// Waiting for the newest collective counts all ends so far, which a capture must do before it ends.
// This count runs on a separate branch, so it does not delay the collectives.
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

/// Describes a collective in messages. Small, because one is stored per recent collective.
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
  /// Uses the current device. Collectives run on `stream`; `counter_stream` joins captures.
  CollectiveCounters(cudaStream_t stream, cudaStream_t counter_stream);
  ~CollectiveCounters();
  CollectiveCounters(const CollectiveCounters&) = delete;
  CollectiveCounters& operator=(const CollectiveCounters&) = delete;

  /// Call before a launch: `collectives` count as enqueued from now on. One launch at a time.
  void begin_eager(std::span<const CollectiveRecord> collectives);
  /// Call after the launch. Returns its number.
  int64_t end_eager();
  /// Replaces end_eager() if the launch threw: its collectives are not watched.
  void cancel_eager();
  /// Enqueues a mark behind the newest eager launch unless one exists. Any thread; not in a
  /// capture.
  void mark_eager();
  /// Like mark_eager(), without a lock if no mark is due. Another thread may still be writing it.
  void mark_when_due() {
    if (mark_is_due_.load(std::memory_order_acquire)) {
      mark_eager();
    }
  }

  /// Call before a captured launch; `id` identifies the capture. The first launch of a capture
  /// joins the counter stream through `ready`, an event recorded in it, and counts a replay's
  /// start.
  void begin_captured(unsigned long long id, cudaEvent_t ready);
  /// Call after the launch. Returns its number.
  int64_t end_captured(std::span<const CollectiveRecord> collectives);
  /// Counts all uncounted ends behind `ended` on the counter stream, which must then be joined.
  /// Does nothing and returns false unless `launch` is the newest.
  bool count_captured(int64_t launch, cudaEvent_t ended);
  /// See OperationLog.
  void hold_counts();
  /// Whether to join the counter stream later. Its last count was just captured.
  bool hold_count();
  /// Whether to join the counter stream now. Ends hold_counts().
  bool release_counts();
  cudaStream_t counter_stream() const { return counter_stream_; }
  /// See OperationLog.
  std::vector<std::string> captured_operations(int64_t after) const;

  /// Call if the device may hang: its memory is then never freed.
  void abandon() { abandoned_ = true; }

  /// Any thread. Lane 0 is the eager lane; one lane per captured graph follows.
  std::vector<LaneProgress> lanes() const;
  /// The collective that did not end, and the counter that stopped.
  std::string describe(const Stall& stall) const;
  /// This rank's position in the eager collectives, without an id. The host does not count replays,
  /// so a captured communicator never looks behind. The probe owns no CUDA memory and may outlive
  /// the counters.
  std::shared_ptr<RevocableProbe> position_probe() const { return position_probe_; }

 private:
  static constexpr size_t kMaxGraphs = 1024;
  static constexpr size_t kRecords = 1024;  // eager collectives

  static constexpr std::chrono::milliseconds kMarkInterval{1};

  struct Graph {
    unsigned long long capture_id = 0;
    std::vector<CollectiveRecord> records;
    std::vector<size_t> counted;  // number of records each count covers, ascending
  };
  // Device totals and their host copies have equal layout: 0 counts eager ends. Two per graph
  // follow: replays started, collectives ended.
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
  std::mutex mark_mutex_;  // orders the marks; held in CUDA calls, so the watchdog never locks it
  mutable std::mutex mutex_;   // guards all below
  int64_t launches_ = 0;       // eager and captured
  bool holds_counts_ = false;  // in a capture
  bool count_is_held_ = false;
  uint64_t eager_begun_ = 0;   // collectives
  uint64_t eager_ended_ = 0;   // launched; fewer than begun during an NCCL launch
  uint64_t eager_marked_ = 0;  // a mark follows or is being written
  uint64_t num_of_all_ = 0;    // eager ones except send and recv, which not all ranks call
  std::chrono::steady_clock::time_point last_mark_{};
  std::array<CollectiveRecord, kRecords> eager_records_{};
  std::array<uint64_t, kRecords> numbers_of_all_{};  // 0: send or recv
  std::array<bool, kRecords> mark_follows_{};
  std::vector<Graph> graphs_;
  const std::shared_ptr<RevocableProbe> position_probe_ =
      std::make_shared<RevocableProbe>([this] { return position(); });
};

}  // namespace ddp::detail
