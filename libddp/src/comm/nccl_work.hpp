// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "comm/collective_counters.hpp"
#include "comm/cuda_event.hpp"
#include "ddp/comm/work.hpp"

namespace ddp::detail {

/// Whether a communicator was aborted, shared with its works, which may outlive it.
class AbortState {
 public:
  /// True for the first call.
  bool abort(const std::string& reason);
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  /// Throws PeerLostError after abort().
  void check(const char* operation) const;

 private:
  std::atomic<bool> aborted_{false};
  mutable std::mutex mutex_;
  std::string reason_;
};

class NcclWork final : public Work {
 public:
  NcclWork(c10::DeviceIndex device, cudaStream_t comm_stream, const CollectiveRecord& collective,
           std::vector<at::Tensor> tensors, std::shared_ptr<const AbortState> state)
      : record(collective),
        device_(device),
        comm_stream_(comm_stream),
        tensors_(std::move(tensors)),
        state_(std::move(state)) {}
  ~NcclWork() override;

  void wait() override;
  void wait_host(std::optional<std::chrono::milliseconds> timeout) override;
  bool is_completed() override;

  /// It was enqueued: `ended` stands behind it.
  void set_ended(CudaEventPool::Event ended) { ended_ = std::move(ended); }
  /// In a capture only: stands behind its counter, a branch that has to be joined as well.
  void set_counted(CudaEventPool::Event counted) { counted_ = std::move(counted); }
  /// A group's end failed: wait() throws it.
  void failed(std::exception_ptr error) { error_ = std::move(error); }
  /// Runs on the communicator's stream behind the collective.
  std::function<void()> after;
  const CollectiveRecord record;
  std::string trace_name;    ///< empty: not traced
  uint64_t trace_begin = 0;  ///< TraceRecorder::mark on the communicator's stream

 private:
  void check() const;

  const c10::DeviceIndex device_;
  const cudaStream_t comm_stream_;
  CudaEventPool::Event ended_;
  CudaEventPool::Event counted_;
  std::vector<at::Tensor> tensors_;
  std::exception_ptr error_;
  const std::shared_ptr<const AbortState> state_;
};

}  // namespace ddp::detail
