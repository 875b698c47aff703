// SPDX-License-Identifier: Apache-2.0
#include "reduce/loss_scale.hpp"

#include <torch/csrc/autograd/engine.h>

#include <mutex>
#include <utility>

namespace ddp::detail {
namespace {

struct Running {
  std::mutex mutex;
  at::Tensor scale;

  at::Tensor exchange(at::Tensor next) {
    const std::lock_guard lock(mutex);
    return std::exchange(scale, std::move(next));
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
  // The gradient of the loss is the first that a backward computes.
  loss.register_hook([scale](const at::Tensor&) {
    running().exchange(scale);
    torch::autograd::Engine::get_default_engine().queue_callback(
        [] { running().exchange(at::Tensor()); });
  });
}

at::Tensor running_loss_scale() {
  auto& state = running();
  const std::lock_guard lock(state.mutex);
  return state.scale;
}

}  // namespace ddp::detail
