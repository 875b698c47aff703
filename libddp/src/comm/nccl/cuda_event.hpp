// SPDX-License-Identifier: Apache-2.0
// What each launch and wait needs from CUDA, as cheap as possible.
#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "comm/cuda_check.hpp"

namespace ddp::detail {

/// A CUDAGuard only if another device is current. A guard's destructor always queries the driver's
/// contexts, which is a measurable cost for small collectives.
class CurrentDevice {
 public:
  explicit CurrentDevice(c10::DeviceIndex device) {
    int current = -1;
    check_cuda(cudaGetDevice(&current), "cudaGetDevice");
    if (current != device) {
      guard_.emplace(device);
    }
  }

 private:
  std::optional<c10::cuda::CUDAGuard> guard_;
};

/// Reusable events without timing: creating an event costs more than recording it.
class CudaEventPool : public std::enable_shared_from_this<CudaEventPool> {
 public:
  /// Returns to its pool when destroyed.
  class Event {
   public:
    Event() = default;
    Event(std::shared_ptr<CudaEventPool> pool, cudaEvent_t event)
        : pool_(std::move(pool)), event_(event) {}
    Event(Event&& other) noexcept
        : pool_(std::move(other.pool_)), event_(std::exchange(other.event_, nullptr)) {}
    Event& operator=(Event&& other) noexcept {
      std::swap(pool_, other.pool_);
      std::swap(event_, other.event_);
      return *this;
    }
    ~Event() {
      if (event_ != nullptr) {
        pool_->give_back(event_);
      }
    }
    explicit operator bool() const { return event_ != nullptr; }
    cudaEvent_t get() const { return event_; }
    void record(cudaStream_t stream) const {
      check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord");
    }
    void block(cudaStream_t stream) const {
      check_cuda(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
    }

   private:
    std::shared_ptr<CudaEventPool> pool_;
    cudaEvent_t event_ = nullptr;
  };

  CudaEventPool() = default;
  CudaEventPool(const CudaEventPool&) = delete;
  CudaEventPool& operator=(const CudaEventPool&) = delete;
  ~CudaEventPool() {
    for (cudaEvent_t event : free_) {
      cudaEventDestroy(event);  // errors cannot be reported here
    }
  }

  /// The current device must be the pool's.
  Event take() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        cudaEvent_t event = free_.back();
        free_.pop_back();
        return {shared_from_this(), event};
      }
    }
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
               "cudaEventCreateWithFlags");
    return {shared_from_this(), event};
  }

 private:
  void give_back(cudaEvent_t event) {
    const std::lock_guard lock(mutex_);
    free_.push_back(event);
  }

  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

}  // namespace ddp::detail
