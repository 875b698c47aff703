// SPDX-License-Identifier: Apache-2.0
#include "ops/shared/timing_event.hpp"

#include <algorithm>
#include <thread>

#ifdef DDP_HAS_CUDA
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#endif

namespace ddp::ops::detail {

bool is_capturing([[maybe_unused]] at::Device device) {
#ifdef DDP_HAS_CUDA
  return device.is_cuda() &&
         c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
#else
  return false;
#endif
}

void delay_device([[maybe_unused]] at::Device device, [[maybe_unused]] double milliseconds) {
#ifdef DDP_HAS_CUDA
  constexpr double kLongestMs = 200;
  constexpr double kCyclesPerMs = 2e6;
  if (device.is_cuda()) {
    at::cuda::sleep(static_cast<int64_t>(std::clamp(milliseconds, 0.0, kLongestMs) * kCyclesPerMs));
  }
#endif
}

// Uses the event made by an earlier eager record(). The capture adds an event node, so that every
// replay records the event.
void TimingEvent::record_in_capture([[maybe_unused]] at::Device device) {
#ifdef DDP_HAS_CUDA
  if (event_) {
    C10_CUDA_CHECK(cudaEventRecordWithFlags(
        static_cast<cudaEvent_t>(event_->eventId()),
        c10::cuda::getCurrentCUDAStream(device.index()).stream(), cudaEventRecordExternal));
  }
#endif
}

}  // namespace ddp::ops::detail
