// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_work.hpp"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <thread>

#include "ddp/core/error.hpp"

namespace ddp::detail {

bool AbortState::abort(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (aborted_) {
    return false;
  }
  reason_ = reason;
  aborted_.store(true, std::memory_order_release);
  return true;
}

void AbortState::check(const char* operation) const {
  if (aborted()) [[unlikely]] {
    const std::lock_guard lock(mutex_);
    throw PeerLostError(concat(operation, ": the communicator was aborted: ", reason_));
  }
}

NcclWork::~NcclWork() {
  if (tensors_.empty() || !ended_ || counted_) {
    return;  // waited for, never launched, or captured (a graph's memory is the graph's)
  }
  // Nobody waited: the memory may be given away while the communicator's stream still uses it, so
  // the allocator is told. Not done where somebody waits: it delays every reuse, and cannot be
  // captured.
  try {
    const auto stream = c10::cuda::getStreamFromExternal(comm_stream_, device_);
    for (auto& tensor : tensors_) {
      tensor.record_stream(stream.unwrap());
    }
  } catch (const std::exception&) {
    // Destructors do not throw; the process is in the middle of a CUDA error then.
  }
}

void NcclWork::check() const {
  if (error_) {
    std::rethrow_exception(error_);
  }
  state_->check(record.name);
  if (!ended_) {
    throw SettingsError(concat(record.name, " #", record.sequence,
                               " was not launched yet: wait after the GroupScope ended"));
  }
}

void NcclWork::wait() {
  check();
  const c10::cuda::CUDAGuard guard(device_);
  const auto stream = c10::cuda::getCurrentCUDAStream(device_).stream();
  ended_.block(stream);
  if (counted_) {
    counted_.block(stream);
  }
  // From here on the stream's order protects the memory.
  tensors_.clear();
}

void NcclWork::wait_host(std::optional<std::chrono::milliseconds> timeout) {
  const auto deadline = timeout ? std::chrono::steady_clock::now() + *timeout
                                : std::chrono::steady_clock::time_point::max();
  while (!is_completed()) {
    check();
    if (counted_) {
      throw SettingsError(concat(record.name, " #", record.sequence,
                                 ": the host cannot wait inside a CUDA graph capture; use wait()"));
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      throw PeerLostError(
          concat(record.to_string(), " did not end within ", timeout->count(), " ms"));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  check();
  tensors_.clear();
}

bool NcclWork::is_completed() {
  if (error_ || state_->aborted()) {
    return true;
  }
  if (!ended_ || counted_) {
    return false;  // a captured event cannot be asked
  }
  const auto code = cudaEventQuery(ended_.get());
  if (code == cudaErrorNotReady) {
    cudaGetLastError();  // "not ready" is not an error to be found by the next check
    return false;
  }
  check_cuda(code, record.name);
  return true;
}

}  // namespace ddp::detail
