// SPDX-License-Identifier: Apache-2.0
#include "ops/streams/weight_gradient.hpp"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <mutex>
#include <utility>

#include "ops/shared/grad_slot.hpp"
#include "ops/shared/private_stream.hpp"
#include "ops/streams/stream_order.hpp"

namespace ddp::ops::detail {
namespace {

/// The stream for weight gradients of backwards on one stream, `main`. A backward's first weight
/// gradient queues the callback that joins both streams when the backward ends. After an exception
/// the held tensors are released.
class WeightGradientStream {
 public:
  explicit WeightGradientStream(const c10::Stream& main)
      : main_(main), side_(make_private_stream(main.device())) {}

  at::Tensor run(const c10::Event& ready, const std::vector<at::Tensor>& inputs, int64_t limit,
                 const std::function<at::Tensor()>& write) {
    join_at_end_of_backward();
    ready.block(side_);
    at::Tensor result;
    {
      const c10::StreamGuard guard(side_);
      result = write();
    }
    hold(inputs, limit);
    return result;
  }

 private:
  void join_at_end_of_backward() {
    const int task = torch::autograd::get_current_graph_task_id();
    {
      const std::lock_guard lock(mutex_);
      if (std::exchange(task_, task) == task) {
        return;
      }
    }
    // The engine calls back only at the end of a backward, but always destroys the callback.
    const std::shared_ptr<WeightGradientStream> opened(
        this, [](WeightGradientStream* stream) { stream->release(); });
    torch::autograd::Engine::get_default_engine().queue_callback([opened] { opened->finish(); });
  }

  void release() {
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

  void finish() {
    const std::lock_guard lock(mutex_);
    task_ = -1;
    join();
    wait_for(main_, current_stream(main_.device()));  // of the caller of backward()
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
    wait_for(side_, main_);
    held_.clear();
    held_bytes_ = 0;
  }

  const c10::Stream main_;
  const c10::Stream side_;
  std::mutex mutex_;  // protects the members below: several threads' backwards may share `main`
  int task_ = -1;     // the engine's task whose end joins
  std::vector<at::Tensor> held_;  // read by `side`; main may reuse them after waiting
  int64_t held_bytes_ = 0;
};

}  // namespace

WeightGradient::WeightGradient(const at::Tensor& parameter, int64_t held_bytes_limit)
    : device_(parameter.device()), held_bytes_limit_(held_bytes_limit) {
  if (held_bytes_limit != 0 && parameter.is_cuda() && find_grad_slot(parameter) != nullptr) {
    ready_.emplace(device_.type());
    ready_->record(current_stream(device_));
  }
}

at::Tensor WeightGradient::compute(const std::vector<at::Tensor>& inputs,
                                   const std::function<at::Tensor()>& write) const {
  if (!ready_) {
    return write();
  }
  return per_stream<WeightGradientStream>(current_stream(device_))
      .run(*ready_, inputs, held_bytes_limit_, write);
}

}  // namespace ddp::ops::detail
