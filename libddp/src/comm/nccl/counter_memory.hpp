// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ddp::detail {

/// Counters that the device writes into mapped host memory, so the host reads them without a CUDA
/// call.
class CounterMemory {
 public:
  /// Zeroed counters of the current device. Uses `stream` and waits for it.
  CounterMemory(size_t num_counters, cudaStream_t stream);
  ~CounterMemory();
  CounterMemory(const CounterMemory&) = delete;
  CounterMemory& operator=(const CounterMemory&) = delete;

  /// The host's view [num_counters]. Read it atomically.
  uint32_t* shown() const { return shown_; }

  /// Enqueues counter `index` += `by`. A captured call counts again in every replay.
  void add(size_t index, uint32_t by, cudaStream_t stream);
  /// Enqueues counter 0 = `value`. Never call add() for it. Any thread.
  void set_first(uint32_t value, cudaStream_t stream);

  /// Call if the device may hang: the memory is then never freed.
  void abandon() { abandoned_ = true; }
  bool is_abandoned() const { return abandoned_; }

 private:
  int device_ = 0;
  uint32_t* totals_ = nullptr;   // device; the host copies have the same layout
  uint32_t* shown_ = nullptr;    // mapped host memory
  void* write_value_ = nullptr;  // cuStreamWriteValue32, null where the driver has none
  std::atomic<bool> abandoned_{false};
};

}  // namespace ddp::detail
