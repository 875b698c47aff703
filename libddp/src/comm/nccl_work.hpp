// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <memory>
#include <string>

#include "comm/collective_counters.hpp"
#include "comm/communicator_state.hpp"
#include "comm/cuda_event.hpp"
#include "comm/launch_ends.hpp"
#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

using NcclLaunchEnds = LaunchEnds<CudaEventPool::Event>;

/// Communicator data that its works need; works may outlive the communicator.
struct WorkOrigin {
  c10::DeviceIndex device = 0;
  cudaStream_t stream = nullptr;  ///< the collectives' stream
  std::shared_ptr<const AbortState> state;
  std::shared_ptr<CollectiveCounters> counters;
  std::shared_ptr<CudaEventPool> events;
  std::shared_ptr<NcclLaunchEnds> ends;
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

  /// The collective was enqueued; `ended` is its launch in the communicator's LaunchEnds.
  void set_ended(NcclLaunchEnds::Launch ended, bool captured) {
    ended_ = std::move(ended);
    captured_ = captured;
  }
  /// Sets the launch number from the counters.
  void set_launch(int64_t launch) { launch_ = launch; }
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
  NcclLaunchEnds::Launch ended_;
  int64_t launch_ = 0;
  bool captured_ = false;
  KeptTensors tensors_;
  std::exception_ptr error_;
};

}  // namespace ddp::detail
