// SPDX-License-Identifier: Apache-2.0
// Time and GPU energy of training: without the first step, without pauses. Torch-free.
#pragma once

#include <chrono>
#include <optional>

namespace ddp::detail {

/// Callers pass the time and the GPU's energy counter (J; NaN if not reported), so that tests need
/// neither sleeps nor a GPU.
class TrainingClock {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  /// The first step ended. Its warm-up, lazy initialisation and earlier work do not count.
  void start(TimePoint now, double energy) {
    started_ = now;
    paused_seconds_ = 0;
    first_energy_ = energy;
    paused_energy_ = 0;
  }
  bool has_started() const { return started_.has_value(); }

  /// Pauses may be nested; the outermost one counts.
  void pause(TimePoint now, double energy) {
    if (pauses_++ == 0) {
      paused_at_ = now;
      energy_at_pause_ = energy;
    }
  }
  void resume(TimePoint now, double energy) {
    if (--pauses_ == 0) {
      paused_seconds_ += std::chrono::duration<double>(now - paused_at_).count();
      paused_energy_ += energy - energy_at_pause_;
    }
  }
  bool is_paused() const { return pauses_ > 0; }

  /// Since start(); 0 before it.
  double seconds(TimePoint now) const {
    const auto until = is_paused() ? paused_at_ : now;
    return started_ ? std::chrono::duration<double>(until - *started_).count() - paused_seconds_
                    : 0;
  }
  double joules(double energy) const {
    return started_ ? (is_paused() ? energy_at_pause_ : energy) - first_energy_ - paused_energy_
                    : 0;
  }

 private:
  std::optional<TimePoint> started_;
  TimePoint paused_at_{};
  double paused_seconds_ = 0;
  int pauses_ = 0;
  double first_energy_ = 0;
  double energy_at_pause_ = 0;
  double paused_energy_ = 0;
};

}  // namespace ddp::detail
