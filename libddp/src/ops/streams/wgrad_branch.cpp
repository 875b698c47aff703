// SPDX-License-Identifier: Apache-2.0
#include "ops/streams/wgrad_branch.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include "ops/grad_slot.hpp"
#include "ops/streams/wgrad_stream.hpp"

#ifdef DDP_HAS_CUDA
#include <c10/core/Event.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "ops/streams/private_stream.hpp"
#include "ops/streams/stream_order.hpp"
#endif

namespace ddp::ops {
namespace {

thread_local int64_t limit_of_thread = 0;

#ifdef DDP_HAS_CUDA
bool is_captured(const c10::Stream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::CUDAStream(stream), &status));
  return status != cudaStreamCaptureStatusNone;
}

/// The branch of one stream, `main`. A backward's first weight gradient on `main` opens the branch,
/// and the end of the backward closes it. After an exception the held tensors are released.
///
///   main  | dgrad 3 | dgrad 2 | dgrad 1 | ...            | end: waits, and the caller for main
///         \ event   \ event                               /
///   side    | wgrad 3 | wgrad 2 | ...                     |
class Branch {
 public:
  explicit Branch(const c10::Stream& main)
      : main_(main), side_(detail::make_private_stream(main.device())) {}

  at::Tensor run(const c10::Event& ready, const std::vector<at::Tensor>& inputs, int64_t limit,
                 const std::function<at::Tensor()>& write) {
    open();
    ready.block(side_);
    at::Tensor result;
    {
      const c10::cuda::CUDAStreamGuard guard(side_);
      result = write();
    }
    hold(inputs, limit);
    return result;
  }

 private:
  void open() {
    const int task = torch::autograd::get_current_graph_task_id();
    {
      const std::lock_guard lock(mutex_);
      if (std::exchange(task_, task) == task) {
        return;
      }
    }
    // The engine calls back only at the end of a backward, but always destroys the callback.
    const std::shared_ptr<Branch> opened(this, [](Branch* branch) { branch->let_go(); });
    torch::autograd::Engine::get_default_engine().queue_callback([opened] { opened->close(); });
  }

  void let_go() {
    const std::lock_guard lock(mutex_);
    try {
      // A capture cannot wait for earlier work: the next end of a backward joins.
      if (!held_.empty() && !is_captured(main_)) {
        join();
      }
    } catch (const std::exception& error) {
      TORCH_WARN("a weight gradient's inputs stay in memory: ", error.what());
    }
  }

  void close() {
    const std::lock_guard lock(mutex_);
    task_ = -1;
    join();
    const c10::Stream caller = c10::cuda::getCurrentCUDAStream(main_.device_index());
    if (caller != main_) {
      detail::wait_for(main_, caller);
    }
  }

  // The allocator does not know of the side stream. If freed now, this memory could be reused by
  // another op on main while the side stream still reads it.
  void hold(const std::vector<at::Tensor>& inputs, int64_t limit) {
    const std::lock_guard lock(mutex_);
    for (const auto& input : inputs) {
      held_.push_back(input);
      held_bytes_ += static_cast<int64_t>(input.nbytes());
    }
    if (held_bytes_ > limit) {
      join();
    }
  }

  void join() {
    detail::wait_for(side_, main_);
    held_.clear();
    held_bytes_ = 0;
  }

  const c10::Stream main_;
  const c10::cuda::CUDAStream side_;
  std::mutex mutex_;  // protects the members below: several threads' backwards may share `main`
  int task_ = -1;     // the engine's task whose end joins
  std::vector<at::Tensor> held_;  // read by `side`; main may reuse them after waiting
  int64_t held_bytes_ = 0;
};
#endif

}  // namespace

WgradBranch::WgradBranch(bool enabled, int64_t max_held_bytes) : outer_limit_(limit_of_thread) {
  const int64_t outer = outer_limit_ > 0 ? outer_limit_ : max_held_bytes;
  limit_of_thread = enabled ? std::min(outer, max_held_bytes) : 0;
}

WgradBranch::~WgradBranch() {
  limit_of_thread = outer_limit_;
}

int64_t WgradBranch::current_limit() {
  return limit_of_thread;
}

namespace detail {

WeightGradient::WeightGradient(const at::Tensor& parameter, int64_t limit)
    : device_(parameter.device()), limit_(limit) {
#ifdef DDP_HAS_CUDA
  if (limit != 0 && parameter.is_cuda() && find_grad_slot(parameter) != nullptr) {
    ready_.emplace(c10::DeviceType::CUDA);
    ready_->record(current_stream(device_));
  }
#endif
}

at::Tensor WeightGradient::make(const std::vector<at::Tensor>& inputs,
                                const std::function<at::Tensor()>& write) const {
#ifdef DDP_HAS_CUDA
  if (ready_) {
    return beside<Branch>(current_stream(device_)).run(*ready_, inputs, limit_, write);
  }
#else
  static_cast<void>(inputs);
#endif
  return write();
}

}  // namespace detail
}  // namespace ddp::ops
