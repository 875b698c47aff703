// SPDX-License-Identifier: Apache-2.0
#include "train/training_clock.hpp"

namespace ddp::detail {

void TrainingClock::start(TimePoint now, double energy) {
  started_ = now;
  paused_seconds_ = 0;
  first_energy_ = energy;
  paused_energy_ = 0;
}

void TrainingClock::pause(TimePoint now, double energy) {
  if (pauses_++ == 0) {
    paused_at_ = now;
    energy_at_pause_ = energy;
  }
}

void TrainingClock::resume(TimePoint now, double energy) {
  if (--pauses_ == 0) {
    paused_seconds_ += std::chrono::duration<double>(now - paused_at_).count();
    paused_energy_ += energy - energy_at_pause_;
  }
}

double TrainingClock::seconds(TimePoint now) const {
  if (!started_) {
    return 0;
  }
  const auto until = is_paused() ? paused_at_ : now;
  return std::chrono::duration<double>(until - *started_).count() - paused_seconds_;
}

double TrainingClock::joules(double energy) const {
  if (!started_) {
    return 0;
  }
  return (is_paused() ? energy_at_pause_ : energy) - first_energy_ - paused_energy_;
}

}  // namespace ddp::detail
