// SPDX-License-Identifier: Apache-2.0
// The counts of one rank since its last log line and in its epoch. Torch-free.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>

#include "train/metrics_ranks.hpp"

namespace ddp::detail {

/// Sums since the start of the run.
struct LossTotals {
  double loss_sum = 0;  ///< each step's mean loss times its targets
  double correct = 0;
  double loss_samples = 0;     ///< targets of the steps with a loss
  double correct_samples = 0;  ///< targets of the steps with correct answers
};

/// Intervals are differences of counts that only grow.
class RankCounter {
 public:
  /// A step ended. The first step of a run is not timed.
  void add_step(int64_t num_samples, bool timed) {
    if (timed) {
      now_.timed_samples += static_cast<double>(num_samples);
      now_.timed_steps += 1;
    }
  }
  /// Waits for the loader so far, when the first step ended: the next log line omits them.
  void begin_loader_wait(double total_ms) {
    now_.loader_wait_ms = at_log_.loader_wait_ms = total_ms;
  }

  /// The counts of this moment.
  struct Reading {
    LossTotals losses;
    double seconds = 0;                         ///< training time after the first step
    double energy_j = 0;                        ///< in `seconds`; NaN if the GPU does not report it
    std::optional<double> loader_wait_ms = {};  ///< since the start
  };
  void read(const Reading& reading) {
    now_.losses = reading.losses;
    now_.seconds = reading.seconds;
    now_.energy_j = reading.energy_j;
    knows_loader_wait_ = reading.loader_wait_ms.has_value();
    now_.loader_wait_ms = reading.loader_wait_ms.value_or(now_.loader_wait_ms);
  }

  /// Up to the last read(). Numbers that are not counted here stay NaN.
  RankNumbers since_log() const { return since(at_log_); }
  RankNumbers since_epoch() const { return since(at_epoch_); }
  void end_log() { at_log_ = now_; }
  /// Also ends the interval of the log line.
  void end_epoch() { at_epoch_ = at_log_ = now_; }

 private:
  struct Counts {
    LossTotals losses;
    double timed_samples = 0;
    double timed_steps = 0;
    double seconds = 0;
    double loader_wait_ms = 0;
    double energy_j = 0;
  };
  RankNumbers since(const Counts& start) const {
    const double steps = now_.timed_steps - start.timed_steps;
    const double wait_ms = now_.loader_wait_ms - start.loader_wait_ms;
    return {.loss_sum = now_.losses.loss_sum - start.losses.loss_sum,
            .loss_samples = now_.losses.loss_samples - start.losses.loss_samples,
            .correct = now_.losses.correct - start.losses.correct,
            .correct_samples = now_.losses.correct_samples - start.losses.correct_samples,
            .samples = now_.timed_samples - start.timed_samples,
            .seconds = now_.seconds - start.seconds,
            .steps = steps,
            .loader_wait_ms = knows_loader_wait_ && steps > 0 ? wait_ms / steps : NAN,
            .energy_j = now_.energy_j - start.energy_j};
  }

  Counts now_, at_log_, at_epoch_;
  bool knows_loader_wait_ = false;
};

}  // namespace ddp::detail
