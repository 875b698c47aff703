// SPDX-License-Identifier: Apache-2.0
// A step captured whole in one CUDA graph.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "bench_common.hpp"

#if DDP_HAS_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#endif

namespace bench {

#if DDP_HAS_CUDA
/// `step` after a few eager ones, on a side stream that is current while it exists.
class CapturedStep {
 public:
  /// By then cuDNN has chosen its algorithms, buckets are laid out anew and NCCL is connected.
  static constexpr int kEagerSteps = 11;

  CapturedStep(at::Device device, std::function<void()> step)
      : step_(std::move(step)),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())) {}

  void operator()() {
    const c10::cuda::CUDAStreamGuard guard(stream_);
    if (eager_steps_ < kEagerSteps) {
      ++eager_steps_;
      step_();
      return;
    }
    if (!captured_) {
      c10::cuda::CUDACachingAllocator::emptyCache();  // what the eager steps used is used no more
      graph_.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
      step_();
      graph_.capture_end();
      captured_ = true;
    }
    graph_.replay();
  }

 private:
  std::function<void()> step_;
  c10::cuda::CUDAStream stream_;
  at::cuda::CUDAGraph graph_;
  int eager_steps_ = 0;
  bool captured_ = false;
};
#endif

/// `loop` with its step captured after the first calls of the warm-up, which must be long enough.
inline Loop captured(Loop loop, const Settings& settings, at::Device device) {
#if DDP_HAS_CUDA
  if (device.is_cuda()) {
    if (settings.number("warmup") <= CapturedStep::kEagerSteps) {
      throw ddp::SettingsError("warmup=" + settings.text("warmup") + " with step=graph: at least " +
                               std::to_string(CapturedStep::kEagerSteps + 1) +
                               ", because the steps before the capture are eager");
    }
    auto step = std::make_shared<CapturedStep>(device, std::move(loop.step));
    loop.step = [step] { (*step)(); };
    return loop;
  }
#endif
  static_cast<void>(settings);
  throw ddp::SettingsError("step=graph on " + device.str() +
                           ": CUDA graphs need a GPU; fix: step=eager");
}

}  // namespace bench
