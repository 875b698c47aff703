// SPDX-License-Identifier: Apache-2.0
// What the models and loaders of a thread wait for. They register themselves, so Metrics reports
// them without a call of the program. Torch-free.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace ddp::detail {

enum class WaitKind {
  Reductions,  ///< of a model: milliseconds in its last backward
  Batches      ///< of a loader: milliseconds since it was made
};

/// Registered from its construction to its destruction, for the thread that constructs it.
class StepWait {
 public:
  /// Finished backwards of a model; nothing if the host cannot count them.
  using NumPasses = std::function<std::optional<int64_t>()>;

  StepWait(WaitKind kind, std::function<double()> milliseconds, NumPasses num_passes = nullptr);
  /// The last wait of a loader stays in total_of_batches().
  ~StepWait();
  StepWait(const StepWait&) = delete;
  StepWait& operator=(const StepWait&) = delete;

  struct Reading {
    uint64_t id = 0;  ///< of the StepWait; no two have the same
    double milliseconds = 0;
    std::optional<int64_t> num_passes = {};
  };
  /// Returns one reading for each StepWait of the calling thread, in the order of construction. A
  /// `milliseconds` function must not call it.
  static std::vector<Reading> read_all(WaitKind kind);

  struct Total {
    double milliseconds = 0;  ///< of all loaders that the thread ever made
    bool has_loader = false;  ///< now
  };
  /// Sums the waits of the calling thread's loaders. A `milliseconds` function must not call it.
  static Total total_of_batches();

 private:
  struct Registry;
  static std::shared_ptr<Registry> registry_of_thread();

  const WaitKind kind_;
  const std::function<double()> milliseconds_;
  const NumPasses num_passes_;
  const std::shared_ptr<Registry> registry_;  // another thread may destroy this object
  const uint64_t id_;
};

/// What all loaders of a run cost while its training clock ran.
class LoaderWait {
 public:
  /// `earlier`: the waits before this run.
  explicit LoaderWait(const StepWait::Total& earlier = {}) : last_ms_(earlier.milliseconds) {}

  /// Adds what the loaders waited since the last reading. `counts`=false: omits these waits, which
  /// were those of a pause.
  void read(const StepWait::Total& total, bool counts = true) {
    const double since = total.milliseconds - last_ms_;
    last_ms_ = total.milliseconds;
    if (total.has_loader || since != 0) {
      total_ms_ = total_ms_.value_or(0) + (counts ? since : 0);
    }
  }
  /// The next total comes from another source, which begins at 0.
  void restart() { last_ms_ = 0; }
  /// Nothing before a loader was read.
  std::optional<double> milliseconds() const { return total_ms_; }

 private:
  double last_ms_;
  std::optional<double> total_ms_;
};

/// The exposed communication of the models that train.
class ReductionWait {
 public:
  /// `earlier`: readings before this run.
  explicit ReductionWait(std::vector<StepWait::Reading> earlier = {}) : last_(std::move(earlier)) {}

  /// Returns the sum over models that finished a backward since the last call. A model whose
  /// backwards the host cannot count always counts. Nothing: there is no model.
  std::optional<double> read(std::vector<StepWait::Reading> readings) {
    std::optional<double> sum;
    for (const auto& reading : readings) {
      const auto before = std::find_if(last_.begin(), last_.end(),
                                       [&](const auto& last) { return last.id == reading.id; });
      const int64_t passes = before == last_.end() ? 0 : before->num_passes.value_or(0);
      const bool trains = !reading.num_passes || *reading.num_passes > passes;
      sum = sum.value_or(0) + (trains ? reading.milliseconds : 0);
    }
    last_ = std::move(readings);
    return sum;
  }

 private:
  std::vector<StepWait::Reading> last_;
};

}  // namespace ddp::detail
