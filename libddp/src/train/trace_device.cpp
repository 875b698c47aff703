// SPDX-License-Identifier: Apache-2.0
#include "train/trace_device.hpp"

#include <sys/resource.h>

#include <cmath>

#include "train/trace.hpp"

#ifdef DDP_HAS_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#if __has_include(<cuda_profiler_api.h>)  // in a separate package
#include <cuda_profiler_api.h>
#define DDP_HAS_CUDA_PROFILER
#endif

#include <nvtx3/nvToolsExt.h>
#include <mutex>
#include <vector>

#include "core/trace_recorder.hpp"
#include "ddp/core/error.hpp"
#endif

namespace ddp {
namespace detail {

#ifdef DDP_HAS_CUDA
namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw InternalError(concat("trace: ", what, ": ", cudaGetErrorString(status)));
  }
}

class CudaTraceDevice final : public TraceDevice {
 public:
  explicit CudaTraceDevice(at::Device device) : device_(device) {
    const c10::cuda::CUDAGuard guard(device_);
    const auto stream = c10::cuda::getCurrentCUDAStream().stream();
    base_ = record(stream);
    check(cudaEventSynchronize(base_), "wait");
    base_ns_ = TraceRecorder::now_ns();
  }
  ~CudaTraceDevice() override {
    cudaEventDestroy(base_);
    for (auto event : events_) {
      cudaEventDestroy(event);
    }
  }

  uint64_t mark(void* stream) override {
    const auto target = stream != nullptr
                            ? static_cast<cudaStream_t>(stream)
                            : c10::cuda::getCurrentCUDAStream(device_.index()).stream();
    // An event recorded into a graph has no time.
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(target, &capturing) != cudaSuccess ||
        capturing != cudaStreamCaptureStatusNone) {
      return 0;
    }
    const c10::cuda::CUDAGuard guard(device_);
    const auto event = record(target);
    std::lock_guard lock(mutex_);
    events_.push_back(event);
    return events_.size();
  }

  int64_t resolve_ns(uint64_t mark) override {
    cudaEvent_t event = nullptr;
    {
      std::lock_guard lock(mutex_);
      event = events_.at(mark - 1);
    }
    float ms = 0;
    check(cudaEventSynchronize(event), "wait");
    check(cudaEventElapsedTime(&ms, base_, event), "elapsed time");
    return base_ns_ + static_cast<int64_t>(static_cast<double>(ms) * 1e6);
  }

 private:
  static cudaEvent_t record(cudaStream_t stream) {
    cudaEvent_t event = nullptr;
    check(cudaEventCreate(&event), "event");
    check(cudaEventRecord(event, stream), "record");
    return event;
  }

  at::Device device_;
  std::mutex mutex_;
  cudaEvent_t base_ = nullptr;
  int64_t base_ns_ = 0;
  std::vector<cudaEvent_t> events_;
};

}  // namespace

std::shared_ptr<TraceDevice> make_trace_device(at::Device device) {
  return device.is_cuda() ? std::make_shared<CudaTraceDevice>(device) : nullptr;
}

void start_profiler([[maybe_unused]] at::Device device) {
#ifdef DDP_HAS_CUDA_PROFILER
  if (device.is_cuda()) {
    cudaProfilerStart();  // its only error: a profiler is already active
  }
#endif
}
void stop_profiler([[maybe_unused]] at::Device device) {
#ifdef DDP_HAS_CUDA_PROFILER
  if (device.is_cuda()) {
    cudaProfilerStop();
  }
#endif
}

std::string pci_bus_id(at::Device device) {
  char text[32] = "";
  const bool good =
      device.is_cuda() && cudaDeviceGetPCIBusId(text, sizeof text, device.index()) == cudaSuccess;
  return good ? text : "";
}
#else
std::shared_ptr<TraceDevice> make_trace_device(at::Device) {
  return nullptr;
}
void start_profiler(at::Device) {}
void stop_profiler(at::Device) {}
std::string pci_bus_id(at::Device) {
  return "";
}
#endif

double used_memory_gib(at::Device device) {
  constexpr double kGib = 1 << 30;
#ifdef DDP_HAS_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    std::size_t free = 0;
    std::size_t total = 0;
    return cudaMemGetInfo(&free, &total) == cudaSuccess ? static_cast<double>(total - free) / kGib
                                                        : NAN;
  }
#endif
  static_cast<void>(device);
  struct rusage usage {};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024 / kGib;
}

}  // namespace detail

void enable_nvtx() {
#ifdef DDP_HAS_CUDA
  // Ranges that need not nest on a thread: a backward begins and ends on different threads. NVTX's
  // own ids may be 0.
  set_range_hooks({.start = [](const char* name) { return nvtxRangeStartA(name) + 1; },
                   .end = [](uint64_t range) { nvtxRangeEnd(range - 1); }});
#endif
}

}  // namespace ddp
