// SPDX-License-Identifier: Apache-2.0
#include "reduce/running_backwards.hpp"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

namespace ddp::detail {

void queue_engine_callback(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

bool RunningBackwards::add(std::function<void()> at_end) {
  const int task = torch::autograd::get_current_graph_task_id();
  if (std::find(tasks_->begin(), tasks_->end(), task) != tasks_->end()) {
    return false;
  }
  tasks_->push_back(task);
  queue_engine_callback(
      [task, &mutex = mutex_, weak = std::weak_ptr(tasks_), at_end = std::move(at_end)] {
        if (const auto tasks = weak.lock()) {
          const std::lock_guard lock(mutex);
          std::erase(*tasks, task);
          at_end();
        }
      });
  return true;
}

void RunningBackwards::forget_thrown() {
  if (torch::autograd::get_current_graph_task_id() == -1) {
    tasks_->clear();
  }
}

}  // namespace ddp::detail
