// SPDX-License-Identifier: Apache-2.0
#include "train/rank_counter.hpp"

namespace ddp::detail {

void RankCounter::add_step(int64_t num_samples, bool timed) {
  if (timed) {
    now_.timed_samples += static_cast<double>(num_samples);
    now_.timed_steps += 1;
  }
}

void RankCounter::begin_loader_wait(double total_ms) {
  now_.loader_wait_ms = total_ms;
  at_log_.loader_wait_ms = total_ms;
}

void RankCounter::read(const Reading& reading) {
  now_.losses = reading.losses;
  now_.seconds = reading.seconds;
  now_.energy_j = reading.energy_j;
  knows_loader_wait_ = reading.loader_wait_ms.has_value();
  now_.loader_wait_ms = reading.loader_wait_ms.value_or(now_.loader_wait_ms);
}

RankNumbers RankCounter::since(const Counts& start) const {
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

}  // namespace ddp::detail
