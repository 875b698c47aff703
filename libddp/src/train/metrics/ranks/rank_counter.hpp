// SPDX-License-Identifier: Apache-2.0
// The counts of one rank since its last log line and in its epoch. Torch-free.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>

#include "train/metrics/ranks/metrics_ranks.hpp"

namespace ddp::detail {

struct LossSums {
  double loss_sum = 0;  ///< each step's mean loss times its targets
  double correct = 0;
  double loss_samples = 0;     ///< targets of the steps with a loss
  double correct_samples = 0;  ///< targets of the steps with correct answers

  LossSums& operator+=(const LossSums& other) {
    loss_sum += other.loss_sum;
    correct += other.correct;
    loss_samples += other.loss_samples;
    correct_samples += other.correct_samples;
    return *this;
  }
};

/// Intervals are differences of counts that only grow. Sums of losses are added and cleared
/// instead, because a NaN would stay in a difference.
class RankCounter {
 public:
  /// A step ended. The first step of a run is not timed.
  void add_step(int64_t num_samples, bool timed) {
    if (timed) {
      now_.timed_samples += static_cast<double>(num_samples);
      now_.timed_steps += 1;
    }
  }
  /// Call when the first step ended. The next log line omits the waits for the loader so far.
  void begin_loader_wait(double total_ms) {
    now_.loader_wait_ms = at_log_.loader_wait_ms = total_ms;
  }

  /// The counts of this moment.
  struct Reading {
    LossSums losses;                            ///< since the last reading
    double seconds = 0;                         ///< training time after the first step
    double energy_j = 0;                        ///< in `seconds`; NaN if the GPU does not report it
    std::optional<double> loader_wait_ms = {};  ///< since the start
  };
  void read(const Reading& reading) {
    log_losses_ += reading.losses;
    epoch_losses_ += reading.losses;
    now_.seconds = reading.seconds;
    now_.energy_j = reading.energy_j;
    knows_loader_wait_ = reading.loader_wait_ms.has_value();
    now_.loader_wait_ms = reading.loader_wait_ms.value_or(now_.loader_wait_ms);
  }

  /// Up to the last read(). Numbers that are not counted here stay NaN.
  RankNumbers since_log() const { return since(at_log_, log_losses_); }
  RankNumbers since_epoch() const { return since(at_epoch_, epoch_losses_); }
  void end_log() {
    at_log_ = now_;
    log_losses_ = {};
  }
  void end_epoch() {
    at_epoch_ = now_;
    epoch_losses_ = {};
  }

 private:
  struct Counts {
    double timed_samples = 0;
    double timed_steps = 0;
    double seconds = 0;
    double loader_wait_ms = 0;
    double energy_j = 0;
  };
  RankNumbers since(const Counts& start, const LossSums& losses) const {
    const double steps = now_.timed_steps - start.timed_steps;
    const double wait_ms = now_.loader_wait_ms - start.loader_wait_ms;
    return {.loss_sum = losses.loss_sum,
            .loss_samples = losses.loss_samples,
            .correct = losses.correct,
            .correct_samples = losses.correct_samples,
            .samples = now_.timed_samples - start.timed_samples,
            .seconds = now_.seconds - start.seconds,
            .steps = steps,
            .loader_wait_ms = knows_loader_wait_ && steps > 0 ? wait_ms / steps : NAN,
            .energy_j = now_.energy_j - start.energy_j};
  }

  Counts now_, at_log_, at_epoch_;
  LossSums log_losses_, epoch_losses_;
  bool knows_loader_wait_ = false;
};

}  // namespace ddp::detail
