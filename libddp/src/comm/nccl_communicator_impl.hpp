// SPDX-License-Identifier: Apache-2.0
// Collectives of CUDA tensors.
//
//   caller's stream   ── work ──┬─────────────── more work ──────┬── uses the result
//                          event │                                │ Work::wait
//   comm stream (high priority)  └─ NCCL ─┬─ event ───────────────┘
//                                         └─ "n collectives ended" into mapped host memory
//
// The host never waits here. collective_counters.hpp explains the counting. Consecutive all_reduces
// below 4 MiB share an event, unless overlapped, grouped or captured: launch_ends.hpp.
#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/argument_checks.hpp"
#include "comm/collective_check.hpp"
#include "comm/collective_counters.hpp"
#include "comm/collective_failure.hpp"
#include "comm/current_device.hpp"
#include "comm/nccl_connect.hpp"
#include "comm/nccl_memory.hpp"
#include "comm/nccl_work.hpp"
#include "comm/operation_log.hpp"
#include "comm/thread_group.hpp"
#include "core/rank_position.hpp"
#include "core/unwinding.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/core/trace_recorder.hpp"
#include "ddp/ops/multiprocessors.hpp"

namespace ddp::detail {

class NcclCommunicator final : public Communicator,
                               public OperationLog,
                               public std::enable_shared_from_this<NcclCommunicator> {
 public:
  /// `no_windows`: why memory cannot be registered, see why_no_windows(). `check` may be null.
  NcclCommunicator(ncclComm_t comm, c10::DeviceIndex device, const CommunicatorOptions& options,
                   CollectiveFailureHandler on_failure, std::shared_ptr<std::atomic<int64_t>> step,
                   std::string no_windows, std::shared_ptr<CollectiveCheck> check);
  ~NcclCommunicator() override;
  void start_watchdog();
  /// `id`: see GroupPosition.
  void tell_positions(std::string id, const WatchPosition& watch);
  const CollectiveCounters& counters() const { return *origin_->counters; }

  const char* backend() const override { return "nccl"; }
  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  at::Device device() const override { return {at::kCUDA, device_}; }

  WorkPtr all_reduce(at::Tensor tensor, ReduceOp op) override {
    return reduce_in_place(tensor, op, /*overlapped=*/false);
  }
  WorkPtr all_reduce_overlapped(at::Tensor tensor, ReduceOp op) override {
    return reduce_in_place(tensor, op, /*overlapped=*/true);
  }
  WorkPtr broadcast(at::Tensor tensor, int root) override;
  WorkPtr reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override;
  WorkPtr all_gather(at::Tensor output, at::Tensor input) override;
  WorkPtr send(at::Tensor tensor, int destination) override;
  WorkPtr recv(at::Tensor tensor, int source) override;
  void barrier() override;
  void group_start() override;
  void group_end() override;
  CommunicatorPtr split(int color, int key) override;
  at::Tensor allocate(int64_t num_bytes) override;
  void abort(const std::string& reason) override;
  void set_step(int64_t step) override { step_->store(step, std::memory_order_relaxed); }
  int64_t num_operations() const override { return num_operations_.load(); }
  std::vector<std::string> captured_operations(int64_t after) const override {
    return origin_->counters->captured_operations(after);
  }
  void hold_counts() override { origin_->counters->hold_counts(); }
  void join_counts() override;

 protected:
  Plan::Identity plan_identity() const override;
  std::vector<AllReduceRow> measure_all_reduce() override;

 private:
  using Works = std::span<const std::shared_ptr<NcclWork>>;

  GroupInfo info() const { return {backend(), rank_, world_size_, device()}; }
  std::chrono::milliseconds limit() const {
    return step_->load(std::memory_order_relaxed) < 1 ? options_.first_step_timeout
                                                      : options_.timeout;
  }
  /// Throws if calls are not allowed: aborted, or inside another communicator's GroupScope.
  void check_usable(const char* name) const {
    state_->check(name);
    refuse_while_unwinding(name);
    ThreadGroup::check(this, name);
  }
  bool is_captured() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device_).stream(), &status),
               "cudaStreamIsCapturing");
    return status == cudaStreamCaptureStatusActive;
  }
  /// Compares a call (name, tensor, operation, root) over the ranks if check_collectives is on,
  /// outside captures. Returns its number among the compared calls.
  template <typename... Args>
  int64_t compare(const char* name, const Args&... args) const {
    if (!check_ || is_captured()) [[likely]] {
      return 0;
    }
    check_usable(name);
    return check_->compare(describe_call(name, args...), limit(), [&] { state_->check(name); });
  }
  /// `call(comm, stream)` enqueues on NCCL. `after` runs once it is enqueued, even if a group
  /// defers it.
  template <typename Call>
  WorkPtr launch(const char* name, const at::Tensor& described, KeptTensors tensors,
                 const Call& call) {
    const std::lock_guard lock(mutex_);
    return launch_locked(name, described, std::move(tensors), call);
  }
  /// `shares_end`: see LaunchEnds.
  template <typename Call>
  WorkPtr launch_locked(const char* name, const at::Tensor& described, KeptTensors tensors,
                        const Call& call, std::function<void()> after = nullptr,
                        bool shares_end = false);
  template <typename Call>
  void enqueue(const char* name, const Call& call);
  // Choice and timing of algorithms (nccl_algorithm.cpp)
  WorkPtr reduce_in_place(const at::Tensor& tensor, ReduceOp op, bool overlapped);
  /// For a float sum or mean inside a window.
  AllReduceAlgorithm choose_algorithm(const at::Tensor& tensor, ReduceOp op, bool overlapped) const;
  /// Called by allocate(), which all ranks call. With nccl_algorithm=auto and no table yet
  /// (measured or adopted), measures one outside groups and captures. The host waits.
  void measure_when_due();
  ncclRedOp_t ring_sum(ncclDataType_t dtype);
  /// Measures in captures, on a communicator that nobody uses eagerly.
  std::vector<AllReduceRow> time_all_sizes();
  double time_all_reduce(float* data, int64_t num_bytes, AllReduceAlgorithm algorithm,
                         bool in_window);
  WorkPtr reduce_int16(const char* name, const at::Tensor& output, const at::Tensor& input,
                       ReduceOp op);
  /// Adds events and counters behind `works`, which were just enqueued.
  void finish_launch(Works works, bool captured, bool shares_end);
  bool begin_launch(bool shares_end);
  void trace(Works works);
  bool look();
  void fail(const std::string& collective, const std::string& message);
  void end_nccl();

  ncclComm_t comm_;
  int rank_ = 0;
  int world_size_ = 1;
  const c10::DeviceIndex device_;
  const CommunicatorOptions options_;
  const CollectiveFailureHandler on_failure_;
  const std::shared_ptr<CollectiveCheck> check_;  // null: calls are not compared
  const std::shared_ptr<std::atomic<int64_t>> step_;
  const std::shared_ptr<AbortState> state_ = std::make_shared<AbortState>();
  const c10::cuda::CUDAStream stream_;
  const std::shared_ptr<const WorkOrigin> origin_;
  CudaEventPool::Event ready_;  // marks the caller's stream position
  const std::string no_windows_;
  std::shared_ptr<NcclMemory> memory_;  // null: windows are not requested or not available
  std::map<ncclDataType_t, ncclRedOp_t> ring_sums_;
  at::Tensor barrier_buffer_;
  std::optional<ops::MultiprocessorReservation> reservation_;  // held until destruction

  std::recursive_timed_mutex mutex_;  // guards launches; held from group_start to group_end
  std::mutex handle_mutex_;           // guards comm_ and children_
  int64_t next_sequence_ = 1;
  std::string id_;  // used in positions
  WatchPosition watch_;
  int64_t num_splits_ = 0;
  std::atomic<int64_t> num_operations_{0};
  int group_depth_ = 0;
  std::vector<std::shared_ptr<NcclWork>> group_;
  std::vector<std::weak_ptr<Communicator>> children_;  // abort with their parent
  StallDetector stalls_{std::chrono::seconds(5)};      // used by the watchdog only
  std::unique_ptr<Watchdog<std::function<bool()>>> watchdog_;
};

// An abort limits its wait for a launching thread, then frees the handle.
template <typename Call>
void NcclCommunicator::enqueue(const char* name, const Call& call) {
  ncclComm_t comm = nullptr;
  {
    const std::lock_guard lock(handle_mutex_);
    state_->check(name);
    comm = comm_;
  }
  const auto code = call(comm, stream_.stream());
  if (code != ncclSuccess && code != ncclInProgress) [[unlikely]] {
    state_->check(name);
    check_nccl(code, comm, name);
  }
}

template <typename Call>
WorkPtr NcclCommunicator::launch_locked(const char* name, const at::Tensor& described,
                                        KeptTensors tensors, const Call& call,
                                        std::function<void()> after, bool shares_end) {
  check_usable(name);
  const CurrentDevice device(device_);
  const CollectiveRecord record{name, next_sequence_++, described.numel(),
                                static_cast<int64_t>(described.nbytes()), described.scalar_type()};
  num_operations_ = record.sequence;
  auto work = std::make_shared<NcclWork>(origin_, record, std::move(tensors));
  work->after = std::move(after);
  const bool captured = begin_launch(shares_end);
  if (auto* recorder = TraceRecorder::active()) {
    work->trace_name = TraceLabel::name_of(name);
    work->trace_begin = recorder->mark(stream_.stream());
  }
  if (group_depth_ > 0) {
    enqueue(name, call);
    group_.push_back(work);
    return work;
  }
  if (!captured) {
    origin_->counters->begin_eager({&record, 1});
  }
  try {
    enqueue(name, call);
    finish_launch({&work, 1}, captured, shares_end);
  } catch (...) {
    if (!captured) {
      origin_->counters->cancel_eager();
    }
    throw;
  }
  return work;
}

}  // namespace ddp::detail
