// SPDX-License-Identifier: Apache-2.0
// How far the collectives of one communicator came, written by the GPU into mapped host memory, so
// that the watchdog reads them without a CUDA call.
//
// Eager collectives: the host counts what it enqueued; after each the stream writes that number.
// Captured collectives: each graph has counters of its own, which count again in every replay. The
// first collective of a capture is preceded by "a replay started", since the host does not see
// replays; the others only count their end.
#pragma once

#include <c10/core/ScalarType.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "comm/watchdog_core.hpp"
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
  /// On the current device; `stream` is used to load the kernels now, not inside a capture.
  explicit CollectiveCounters(cudaStream_t stream);
  ~CollectiveCounters();
  CollectiveCounters(const CollectiveCounters&) = delete;
  CollectiveCounters& operator=(const CollectiveCounters&) = delete;

  /// Before the launch: from now on these count as enqueued.
  void enqueue_eager(const std::vector<CollectiveRecord>& launched);
  /// After the launch: `stream` writes that all enqueued ones ended.
  void mark_eager_end(cudaStream_t stream);

  /// Before the first captured launch of capture `id`: true, and `stream` counts a replay's start.
  bool begin_captured(unsigned long long id, cudaStream_t stream);
  /// After a captured launch: `stream` counts the end of these.
  void mark_captured_end(const std::vector<CollectiveRecord>& launched, cudaStream_t stream);

  /// The device may hang from now on: its memory is never freed.
  void abandon() { abandoned_ = true; }

  /// Any thread. Lane 0 is the eager one, then one a captured graph.
  std::vector<LaneProgress> lanes() const;
  /// The collective that did not end, and which counter stands.
  std::string describe(const Stall& stall) const;

 private:
  static constexpr size_t kMaxGraphs = 1024;
  static constexpr size_t kRecords = 1024;  // of eager collectives

  struct Graph {
    unsigned long long capture_id = 0;
    std::vector<CollectiveRecord> records;
  };
  // Device totals and what the host sees of them, in the same places: 0 the eager end, then two a
  // graph: replays started, collectives ended.
  static constexpr size_t kNumCounters = 1 + 2 * kMaxGraphs;
  static size_t started_of(size_t graph) { return 1 + 2 * graph; }
  static size_t ended_of(size_t graph) { return 2 + 2 * graph; }
  uint32_t read(size_t counter) const;

  uint32_t* totals_ = nullptr;   // device
  uint32_t* shown_ = nullptr;    // mapped host memory
  void* write_value_ = nullptr;  // cuStreamWriteValue32, null where the driver has none
  std::atomic<bool> abandoned_{false};
  mutable std::mutex mutex_;
  uint64_t eager_enqueued_ = 0;
  std::array<CollectiveRecord, kRecords> eager_records_{};
  std::vector<Graph> graphs_;
};

}  // namespace ddp::detail
