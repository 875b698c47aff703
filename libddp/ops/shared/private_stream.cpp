// SPDX-License-Identifier: Apache-2.0
#include "ops/shared/private_stream.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#ifdef DDP_HAS_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace ddp::ops::detail {

c10::Stream make_private_stream(c10::Device device, StreamPriority priority) {
#ifdef DDP_HAS_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    // The first step may be captured.
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    int lowest = 0, highest = 0;
    C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    cudaStream_t stream = nullptr;
    C10_CUDA_CHECK(cudaStreamCreateWithPriority(
        &stream, cudaStreamNonBlocking,
        std::max(highest, priority == StreamPriority::Highest  ? highest
                          : priority == StreamPriority::Middle ? lowest - 1
                                                               : lowest)));
    return c10::cuda::getStreamFromExternal(stream, device.index());
  }
#endif
  static_cast<void>(priority);
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

bool is_captured(const c10::Stream& stream) {
#ifdef DDP_HAS_CUDA
  if (stream.device().is_cuda()) {
    const c10::cuda::CUDAGuard guard(stream.device());  // the default stream has no device
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::CUDAStream(stream), &status));
    return status != cudaStreamCaptureStatusNone;
  }
#endif
  static_cast<void>(stream);
  return false;
}

}  // namespace ddp::ops::detail
