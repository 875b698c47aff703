// SPDX-License-Identifier: Apache-2.0
// Enqueues and counts the collectives of one communicator: order, streams, events, groups,
// captures.
//
//   caller's stream   ── work ──┬─────────────── more work ──────┬── uses the result
//                          event │                                │ Work::wait
//   comm stream (high priority)  └─ NCCL ─┬─ event ───────────────┘
//                                         └─ "n collectives ended" into mapped host memory
//
// The host never waits here. collective_counters.hpp explains the counting.
#pragma once

#include <c10/cuda/CUDAStream.h>
#include <c10/util/FunctionRef.h>
#include <nccl.h>

#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "comm/nccl/nccl_handle.hpp"
#include "comm/nccl/nccl_work.hpp"

namespace ddp::detail {

class NcclLauncher {
 public:
  using Lock = std::unique_lock<std::recursive_timed_mutex>;
  /// Enqueues one collective on NCCL.
  using Call = c10::function_ref<ncclResult_t(ncclComm_t, cudaStream_t)>;

  /// `handle` outlives the launcher.
  explicit NcclLauncher(NcclHandle& handle);
  NcclLauncher(const NcclLauncher&) = delete;
  NcclLauncher& operator=(const NcclLauncher&) = delete;

  /// Nothing else is launched while the lock is held. A thread may take it repeatedly.
  Lock lock() { return Lock(mutex_); }
  /// The returned lock may not own the mutex.
  Lock lock_within(std::chrono::milliseconds limit) { return {mutex_, limit}; }

  /// Throws if calls are not allowed: aborted, or inside another communicator's GroupScope.
  void check_usable(const char* name) const;
  /// Whether the caller's current stream is captured.
  cudaStreamCaptureStatus capture_status() const;

  /// `described` is the tensor in messages, undefined if its size differs between ranks. `tensors`
  /// stay alive; the first is defined. `after` runs once the call is enqueued, even if a group
  /// defers it.
  WorkPtr launch(const char* name, const at::Tensor& described, KeptTensors tensors, Call call,
                 std::function<void()> after = nullptr);
  /// Makes the communicator's stream wait for the caller's enqueued work. Returns true inside a
  /// capture. launch() includes it. Call it with the lock.
  bool begin();
  /// Enqueues a call that is neither waited for nor counted. launch() includes it. Call it with the
  /// lock.
  void enqueue(const char* name, Call call);
  /// Takes the lock until the matching group_end().
  void group_start();
  /// Never throws. Each work of the group rethrows its error in wait().
  void group_end();

  const c10::cuda::CUDAStream& stream() const { return stream_; }
  CollectiveCounters& counters() const { return *origin_->counters; }
  /// See CapturableCommunicator.
  void join_counts();

 private:
  using Works = std::span<const std::shared_ptr<NcclWork>>;

  /// Adds an event and counters behind `works`, which were just enqueued.
  void finish(Works works, bool captured);
  void trace(Works works);

  NcclHandle& handle_;
  const c10::cuda::CUDAStream stream_;
  const std::shared_ptr<const WorkOrigin> origin_;
  std::recursive_timed_mutex mutex_;  // guards all below; held from group_start to group_end
  CudaEventPool::Event ready_;        // marks the caller's stream position
  int64_t next_sequence_ = 1;
  int group_depth_ = 0;
  std::vector<std::shared_ptr<NcclWork>> group_;
};

}  // namespace ddp::detail
