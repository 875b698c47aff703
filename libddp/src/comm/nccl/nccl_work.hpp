// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <memory>
#include <string>

#include "comm/communicator_state.hpp"
#include "comm/nccl/collective_counters.hpp"
#include "comm/nccl/cuda_event.hpp"
#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

/// Data of a communicator for its works, which may outlive it.
struct WorkOrigin {
  c10::DeviceIndex device = 0;
  cudaStream_t stream = nullptr;  ///< the collectives' stream
  std::shared_ptr<const AbortState> state;
  std::shared_ptr<CollectiveCounters> counters;
  std::shared_ptr<CudaEventPool> events;
};

/// Inputs and outputs of a collective; unused entries are undefined.
using KeptTensors = std::array<at::Tensor, 4>;

class NcclWork final : public Work {
 public:
  NcclWork(std::shared_ptr<const WorkOrigin> origin, const CollectiveRecord& collective,
           KeptTensors tensors)
      : record(collective), origin_(std::move(origin)), tensors_(std::move(tensors)) {}
  ~NcclWork() override;

  void wait() override;
  void wait_host(std::optional<std::chrono::milliseconds> timeout) override;
  bool is_completed() override;

  /// The collective was enqueued. `ended` is recorded behind it; works of one group share it.
  void set_launch(std::shared_ptr<const CudaEventPool::Event> ended, bool captured) {
    ended_ = std::move(ended);
    captured_ = captured;
  }
  /// Its number in the counters.
  void set_launch_number(int64_t number) { launch_number_ = number; }
  /// The group's end failed: wait() throws the error.
  void failed(std::exception_ptr error) { error_ = std::move(error); }
  /// Runs on the communicator's stream behind the collective.
  std::function<void()> after;
  const CollectiveRecord record;
  std::string trace_name;    ///< empty: not traced
  uint64_t trace_begin = 0;  ///< TraceRecorder::mark on the communicator's stream

 private:
  void check() const;

  const std::shared_ptr<const WorkOrigin> origin_;
  std::shared_ptr<const CudaEventPool::Event> ended_;  // null: not launched yet
  int64_t launch_number_ = 0;
  bool captured_ = false;
  KeptTensors tensors_;
  std::exception_ptr error_;
};

}  // namespace ddp::detail
