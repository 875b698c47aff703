// SPDX-License-Identifier: Apache-2.0
// The engine's tasks of one model's backwards that have not ended.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

namespace ddp::detail {

class RunningBackwards {
 public:
  RunningBackwards() = default;
  ~RunningBackwards() { clear(); }
  RunningBackwards(const RunningBackwards&) = delete;
  RunningBackwards& operator=(const RunningBackwards&) = delete;

  /// Returns false if `task` is known.
  bool add(int task) {
    if (std::find(tasks_.begin(), tasks_.end(), task) != tasks_.end()) {
      return false;
    }
    tasks_.push_back(task);
    ++num_of_all_models();
    return true;
  }
  void remove(int task) { num_of_all_models() -= static_cast<int>(std::erase(tasks_, task)); }
  /// After an exception, which no callback reports.
  void clear() {
    num_of_all_models() -= static_cast<int>(tasks_.size());
    tasks_.clear();
  }

  bool empty() const { return tasks_.empty(); }
  /// Whether a backward of any model in this process runs.
  static bool any() { return num_of_all_models() > 0; }

 private:
  static std::atomic<int>& num_of_all_models() {
    static std::atomic<int> number = 0;
    return number;
  }

  std::vector<int> tasks_;
};

}  // namespace ddp::detail
