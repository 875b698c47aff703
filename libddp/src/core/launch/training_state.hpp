// SPDX-License-Identifier: Apache-2.0
// What this process has trained: whether a stop must save, and whether the first step is over.
// Torch-free.
#pragma once

#include <cstdint>
#include <functional>

namespace ddp::detail {

/// The first step begins: a step was announced, a wrapped model ran in grad mode, or the program
/// asked for stop requests and so handles them itself. Any thread.
void record_training_state();
bool has_training_state();

inline constexpr int64_t kTrainingForward = -1;    ///< of a wrapped model, in grad mode
inline constexpr int64_t kEvaluationForward = -2;  ///< without gradients

/// Calls the hook, if any, with each announced step (>= 0), and with one of the constants above
/// after a forward of a wrapped model. An evaluation is no training state. The hook may throw;
/// ddp::run sets it while no other thread runs.
void report_step(int64_t step);
void set_step_hook(std::function<void(int64_t step)> hook);

/// A wrapped model runs forward after its first reduced backward. Any thread.
void record_later_step();

/// The step of a rank that trains and has announced no step.
inline constexpr int64_t kUnknownStep = -3;

/// Training since the watch was made, also of programs that announce no step. Any thread.
class TrainingWatch {
 public:
  TrainingWatch();
  bool has_ended_first_step() const;  ///< see record_later_step()
  /// `announced`, the step that was announced last (-1: none); kUnknownStep if none was and a
  /// training forward ended since the watch was made.
  int64_t step_of(int64_t announced) const;

 private:
  const int64_t forwards_at_start_, later_steps_at_start_;
};

/// stop_requested() for the library's own phases, without noting that the program asked.
bool is_stop_requested();

}  // namespace ddp::detail
