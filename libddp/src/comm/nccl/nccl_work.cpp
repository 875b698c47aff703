// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/nccl_work.hpp"

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <thread>

#include "comm/nccl/cuda_event.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

NcclWork::~NcclWork() {
  if (!tensors_[0].defined() || ended_ == nullptr || captured_) {
    return;  // waited for, never launched, or captured (the graph owns its memory)
  }
  // Without a wait, the memory could be reused while the communicator's stream still uses it, so
  // the allocator is notified. That delays every reuse and cannot be captured, so works that were
  // waited for skip it.
  try {
    const c10::cuda::CUDAGuard guard(origin_->device);
    const auto stream = c10::cuda::getStreamFromExternal(origin_->stream, origin_->device);
    for (auto& tensor : tensors_) {
      if (tensor.defined()) {
        tensor.record_stream(stream.unwrap());
      }
    }
    origin_->counters->mark_when_due();
  } catch (const std::exception&) {
    // Destructors do not throw. A CUDA error is already pending here.
  }
}

void NcclWork::check() const {
  origin_->state->check(
      record.name);  // before error_: an abort's reason is clearer than NCCL's error
  if (error_) {
    std::rethrow_exception(error_);
  }
  if (ended_ == nullptr) {
    throw SettingsError(concat(record.name, " #", record.sequence,
                               " was not launched yet; fix: wait after the GroupScope has ended"));
  }
}

void NcclWork::wait() {
  check();
  const auto stream = c10::cuda::getCurrentCUDAStream(origin_->device).stream();
  const CurrentDevice device(origin_->device);
  ended_->block(stream);
  if (!captured_) {
    origin_->counters->mark_when_due();
  } else if (origin_->counters->count_captured(launch_number_, ended_->get()) &&
             !origin_->counters->hold_count()) {
    const auto counted = origin_->events->take();
    counted.record(origin_->counters->counter_stream());
    counted.block(stream);
  }
  // From here on stream order protects the memory.
  tensors_ = {};
}

void NcclWork::wait_host(std::optional<std::chrono::milliseconds> timeout) {
  const auto deadline = timeout ? std::chrono::steady_clock::now() + *timeout
                                : std::chrono::steady_clock::time_point::max();
  while (!is_completed()) {
    check();
    if (captured_) {
      throw SettingsError(
          concat(record.name, " #", record.sequence,
                 ": the host cannot wait inside a CUDA graph capture; fix: use wait()"));
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      throw PeerLostError(
          concat(record.to_string(), " did not end within ", timeout->count(), " ms"));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  check();
  tensors_ = {};
}

bool NcclWork::is_completed() {
  if (error_ || origin_->state->aborted()) {
    return true;
  }
  if (ended_ == nullptr || captured_) {
    return false;  // a captured event cannot be queried
  }
  const c10::cuda::CUDAStreamCaptureModeGuard guard(cudaStreamCaptureModeRelaxed);
  const auto code = cudaEventQuery(ended_->get());
  if (code == cudaErrorNotReady) {
    cudaGetLastError();  // clears "not ready", which the next check would report as an error
    origin_->counters->mark_when_due();
    return false;
  }
  check_cuda(code, record.name);
  return true;
}

}  // namespace ddp::detail
