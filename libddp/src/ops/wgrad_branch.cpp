// SPDX-License-Identifier: Apache-2.0
#include "ddp/ops/wgrad_branch.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "ddp/ops/grad_slot.hpp"
#include "ops/wgrad_stream.hpp"

#ifdef DDP_HAS_CUDA
#include <c10/core/Event.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace ddp::ops {
namespace {

thread_local int64_t limit_of_thread = 0;

#ifdef DDP_HAS_CUDA
void wait_for(const c10::Stream& waiting, const c10::Stream& other) {
  c10::Event event(c10::DeviceType::CUDA);
  event.record(other);
  event.block(waiting);
}

/// One device's branch. A backward opens it with its first weight gradient and its end closes it.
///
///   main  | dgrad 3 | dgrad 2 | dgrad 1 | ...            | end: waits
///            \ event   \ event                            /
///   side      | wgrad 3   | wgrad 2 | ...                 |
class Branch {
 public:
  explicit Branch(c10::DeviceIndex device)
      : side_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device)) {}

  at::Tensor run(const std::vector<at::Tensor>& inputs, int64_t limit,
                 const std::function<at::Tensor()>& write) {
    const c10::cuda::CUDAStream main = c10::cuda::getCurrentCUDAStream(side_.device_index());
    open();
    wait_for(side_, main);
    at::Tensor result;
    {
      const c10::cuda::CUDAStreamGuard guard(side_);
      result = write();
    }
    // The allocator knows nothing of the side stream: freed now, this memory would be handed to the
    // main stream while the side stream still reads it.
    for (const auto& input : inputs) {
      held_.push_back(input);
      held_bytes_ += static_cast<int64_t>(input.nbytes());
    }
    if (held_bytes_ > limit) {
      join(main);
    }
    return result;
  }

 private:
  void open() {
    const int task = torch::autograd::get_current_graph_task_id();
    if (std::exchange(task_, task) == task) {
      return;
    }
    torch::autograd::Engine::get_default_engine().queue_callback([this] {
      task_ = -1;
      join(c10::cuda::getCurrentCUDAStream(side_.device_index()));
    });
  }

  void join(const c10::Stream& main) {
    wait_for(main, side_);
    held_.clear();
    held_bytes_ = 0;
  }

  c10::cuda::CUDAStream side_;
  int task_ = -1;  // of the engine, whose end joins
  std::vector<at::Tensor> held_;
  int64_t held_bytes_ = 0;
};

/// Backwards of one device run on one engine thread, so a branch needs no lock of its own.
Branch& branch_of(c10::DeviceIndex device) {
  static std::mutex mutex;
  static auto* branches = new std::map<c10::DeviceIndex, Branch>;
  const std::lock_guard lock(mutex);
  return branches->try_emplace(device, device).first->second;
}
#endif

}  // namespace

WgradBranch::WgradBranch(bool enabled, int64_t max_held_bytes)
    : outer_limit_(std::exchange(limit_of_thread, enabled ? max_held_bytes : 0)) {}

WgradBranch::~WgradBranch() {
  limit_of_thread = outer_limit_;
}

int64_t WgradBranch::current_limit() {
  return limit_of_thread;
}

namespace detail {

at::Tensor make_weight_gradient(const at::Tensor& parameter, int64_t limit,
                                const std::vector<at::Tensor>& inputs,
                                const std::function<at::Tensor()>& write) {
#ifdef DDP_HAS_CUDA
  if (limit != 0 && parameter.is_cuda() && find_grad_slot(parameter) != nullptr) {
    return branch_of(parameter.device().index()).run(inputs, limit, write);
  }
#else
  static_cast<void>(parameter), static_cast<void>(limit), static_cast<void>(inputs);
#endif
  return write();
}

}  // namespace detail
}  // namespace ddp::ops
