// SPDX-License-Identifier: Apache-2.0
// What the models and loaders of a thread wait for. They register themselves, so Metrics reports
// them without a call of the program. Torch-free.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

namespace ddp::detail {

enum class WaitKind {
  Reductions,  ///< of a model: milliseconds in its last backward
  Batches      ///< of a loader: milliseconds since it was made
};

/// Registered from its construction to its destruction, for the thread that constructs it.
class StepWait {
 public:
  StepWait(WaitKind kind, std::function<double()> milliseconds);
  ~StepWait();
  StepWait(const StepWait&) = delete;
  StepWait& operator=(const StepWait&) = delete;

  struct Reading {
    uint64_t id = 0;  ///< of the StepWait; no two have the same
    double milliseconds = 0;
  };
  /// Those that the calling thread constructed, in order. Not inside a `milliseconds` function.
  static std::vector<Reading> read_all(WaitKind kind);

 private:
  const WaitKind kind_;
  const std::function<double()> milliseconds_;
  const std::thread::id thread_;
  const uint64_t id_;
};

/// What all loaders of a run cost while its training clock ran.
class LoaderWait {
 public:
  /// Adds what each loader waited since its last reading. `counts`=false: omits these waits, which
  /// were those of a pause.
  void read(const std::vector<StepWait::Reading>& readings, bool counts = true) {
    std::vector<StepWait::Reading> before;
    before.swap(last_);
    for (const auto& reading : readings) {
      double since = reading.milliseconds;
      for (const auto& last : before) {
        since -= last.id == reading.id ? last.milliseconds : 0;
      }
      total_ms_ = total_ms_.value_or(0) + (counts ? since : 0);
    }
    last_ = readings;
  }
  /// Nothing before a loader was read.
  std::optional<double> milliseconds() const { return total_ms_; }

 private:
  std::vector<StepWait::Reading> last_;
  std::optional<double> total_ms_;
};

}  // namespace ddp::detail
