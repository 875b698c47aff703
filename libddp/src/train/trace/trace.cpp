// SPDX-License-Identifier: Apache-2.0
#include "train/trace/trace.hpp"

#include <sys/resource.h>

#include <cmath>
#include <utility>

#include "core/control/rank_position.hpp"
#include "core/control/wire/message_codec.hpp"
#include "core/files/file_ops.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "train/trace/trace_merge.hpp"

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

#include "comm/cuda_check.hpp"
#endif

namespace ddp {
namespace {

#ifdef DDP_HAS_CUDA
/// Marks as CUDA events, synchronized once with the steady clock.
class CudaTraceDevice final : public TraceDevice {
 public:
  explicit CudaTraceDevice(at::Device device) : device_(device) {
    const c10::cuda::CUDAGuard guard(device_);
    const auto stream = c10::cuda::getCurrentCUDAStream().stream();
    base_ = record(stream);
    detail::check_cuda(cudaEventSynchronize(base_), "a wait for the trace's clock event");
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
    detail::check_cuda(cudaEventSynchronize(event), "a wait for a trace event");
    detail::check_cuda(cudaEventElapsedTime(&ms, base_, event), "the time of a trace event");
    return base_ns_ + static_cast<int64_t>(static_cast<double>(ms) * 1e6);
  }

 private:
  static cudaEvent_t record(cudaStream_t stream) {
    cudaEvent_t event = nullptr;
    detail::check_cuda(cudaEventCreate(&event), "making a trace event");
    detail::check_cuda(cudaEventRecord(event, stream), "recording a trace event");
    return event;
  }

  at::Device device_;
  std::mutex mutex_;
  cudaEvent_t base_ = nullptr;
  int64_t base_ns_ = 0;
  std::vector<cudaEvent_t> events_;
};

#endif

// nullptr for the CPU.
std::shared_ptr<TraceDevice> make_trace_device([[maybe_unused]] at::Device device) {
#ifdef DDP_HAS_CUDA
  if (device.is_cuda()) {
    return std::make_shared<CudaTraceDevice>(device);
  }
#endif
  return nullptr;
}

// Nsight records between start and stop with --capture-range=cudaProfilerApi (ncu:
// --profile-from-start off).
void control_profiler([[maybe_unused]] at::Device device, [[maybe_unused]] bool start) {
#ifdef DDP_HAS_CUDA_PROFILER
  if (device.is_cuda()) {
    start ? cudaProfilerStart() : cudaProfilerStop();  // fails only if a profiler is active
  }
#endif
}

}  // namespace

Tracer::Tracer(ControlPlane& control_plane, at::Device device, std::string path, int64_t first_step,
               int64_t num_steps, int64_t next_step)
    : control_plane_(control_plane),
      device_(device),
      path_(std::move(path)),
      first_step_(first_step),
      num_steps_(num_steps) {
  if (first_step_ == next_step) {
    begin();
  } else if (first_step_ < next_step) {
    give_up(next_step);
  }
}

Tracer::~Tracer() {
  recorder_.stop();
}

void Tracer::begin() {
  const detail::ActivityScope activity(control_plane_, "trace");
  control_plane_.barrier();
  recorder_.set_device(make_trace_device(device_));
  recorder_.set_step(first_step_);
  recording_ = true;
  control_profiler(device_, /*start=*/true);
  recorder_.start();
}

void Tracer::give_up(int64_t next_step) {
  recorder_.stop();
  recording_ = false;
  done_ = true;
  if (control_plane_.rank() == 0) {
    log_warning(concat("nothing is traced: metrics.trace_first_step=", first_step_,
                       " is in the past, this run continues with step ", next_step));
  }
}

void Tracer::end_step(int64_t step) {
  if (done_) {
    return;
  }
  const bool begun = recording_ ? step > first_step_ : step >= first_step_;
  if (!std::exchange(seen_step_, true) && begun) {
    give_up(step);  // the constructor was not given the resumed step
    return;
  }
  if (recording_) {
    recorder_.set_step(step + 1);
    if (step + 1 >= first_step_ + num_steps_) {
      finish();
    }
  } else if (step + 1 == first_step_) {
    begin();
  }
}

void Tracer::finish() {
  recorder_.stop();
  recording_ = false;
  done_ = true;
  const auto events = recorder_.take();  // waits for the steps' kernels
  control_profiler(device_, /*start=*/false);
  const detail::ActivityScope activity(control_plane_, "trace");
  const auto offset = detail::measure_clock_offset(control_plane_);
  const auto by_rank = detail::gather_events(control_plane_, events);
  const auto offsets = detail::gather_messages(control_plane_, offset);
  if (recorder_.num_dropped() > 0) {
    log_warning(std::to_string(recorder_.num_dropped()) + " spans did not fit into the trace");
  }
  if (control_plane_.rank() != 0) {
    return;
  }
  try {
    replace_file(system_file_ops(), path_, {detail::trace_to_json(by_rank, offsets)});
    log_info("wrote the trace of " + std::to_string(num_steps_) + " steps to " + path_ +
             " (open it in https://ui.perfetto.dev)");
  } catch (const WriteError& error) {
    log_warning("cannot write the trace " + path_ + ": " + error.what());
  }
}

namespace detail {

std::string pci_bus_id([[maybe_unused]] at::Device device) {
#ifdef DDP_HAS_CUDA
  char text[32] = "";
  if (device.is_cuda() && cudaDeviceGetPCIBusId(text, sizeof text, device.index()) == cudaSuccess) {
    return text;
  }
#endif
  return "";
}

double used_memory_gib([[maybe_unused]] at::Device device) {
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
