// SPDX-License-Identifier: Apache-2.0
#include "reduce/hooks/loss_scale.hpp"

#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <mutex>
#include <utility>

namespace ddp::detail {
namespace {

struct Running {
  std::mutex mutex;
  std::weak_ptr<const at::Tensor> scale;

  void set(const std::shared_ptr<const at::Tensor>& next) {
    const std::lock_guard lock(mutex);
    scale = next;
  }
};

// One for all threads, because a backward runs on the engine's threads. Never destroyed: CUDA may
// be gone before static objects.
Running& running() {
  static auto& scale = *new Running;
  return scale;
}

}  // namespace

void set_loss_scale(const at::Tensor& loss, const at::Tensor& scale) {
  if (!loss.requires_grad()) {
    return;
  }
  // The gradient of the loss is the first that a backward computes. The engine's graph task owns
  // the scale through its callback, so the scale ends with a backward that throws, too. A nested
  // backward (checkpointing) is a task of its own and finds the scale of the outer one.
  loss.register_hook([scale](const at::Tensor&) {
    auto owned = std::make_shared<const at::Tensor>(scale);
    running().set(owned);
    torch::autograd::Engine::get_default_engine().queue_callback(
        [owned = std::move(owned)] { running().set(nullptr); });
  });
}

at::Tensor running_loss_scale() {
  auto& state = running();
  const std::lock_guard lock(state.mutex);
  const auto scale = state.scale.lock();
  return scale != nullptr ? *scale : at::Tensor();
}

}  // namespace ddp::detail
