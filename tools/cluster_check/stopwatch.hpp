// SPDX-License-Identifier: Apache-2.0
// Times work on a rank's device: by events on the current stream, or the host's clock on a CPU.
#pragma once

#include <c10/core/Device.h>

#include <chrono>

#if DDP_HAS_CUDA
#include <ATen/cuda/CUDAEvent.h>
#endif

namespace cluster_check {

class Stopwatch {
 public:
  explicit Stopwatch(c10::Device device) : is_cuda_(device.is_cuda()) {}

  void start() { mark(begin_); }
  void stop() { mark(end_); }
  /// Milliseconds from start() to stop(). The host waits for the device.
  double milliseconds() {
#if DDP_HAS_CUDA
    if (is_cuda_) {
      end_.event.synchronize();
      return begin_.event.elapsed_time(end_.event);
    }
#endif
    return std::chrono::duration<double, std::milli>(end_.time - begin_.time).count();
  }
  /// Whether the device has passed stop(); never waits.
  bool is_done() {
#if DDP_HAS_CUDA
    if (is_cuda_) {
      return end_.event.query();
    }
#endif
    return true;
  }

 private:
  struct Moment {
    std::chrono::steady_clock::time_point time;
#if DDP_HAS_CUDA
    at::cuda::CUDAEvent event{cudaEventDefault};
#endif
  };

  void mark(Moment& moment) {
#if DDP_HAS_CUDA
    if (is_cuda_) {
      moment.event.record();
      return;
    }
#endif
    moment.time = std::chrono::steady_clock::now();
  }

  bool is_cuda_;
  Moment begin_, end_;
};

}  // namespace cluster_check
