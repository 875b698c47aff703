// SPDX-License-Identifier: Apache-2.0
// The backwards of one kind that began and have not ended. Each is one task of the autograd engine.
// A nested backward (checkpointing) is a task of its own.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace ddp::detail {

/// `callback` runs when the innermost running backward ends without an exception.
void queue_engine_callback(std::function<void()> callback);

/// Use it with `mutex` locked.
class RunningBackwards {
 public:
  explicit RunningBackwards(std::mutex& mutex) : mutex_(mutex) {}

  /// Adds the backward that runs in this thread. When it ends without an exception it is removed,
  /// and `at_end` runs with the mutex locked, if this object still lives. Returns false, and does
  /// nothing, if the backward is known.
  bool add(std::function<void()> at_end);
  bool empty() const { return tasks_->empty(); }
  void clear() { tasks_->clear(); }
  /// Forgets backwards that an exception ended. Call it where none runs; does nothing inside one.
  void forget_thrown();

 private:
  std::mutex& mutex_;
  // Callbacks on the engine hold it weakly: a graph may outlive this object.
  const std::shared_ptr<std::vector<int>> tasks_ = std::make_shared<std::vector<int>>();
};

}  // namespace ddp::detail
