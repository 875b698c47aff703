// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/ranks/metrics_ranks.hpp"

#include <algorithm>

namespace ddp::detail {
namespace {

// A mean of known values; NaN means unknown.
struct Mean {
  double sum = 0;
  int count = 0;
  void add(double value) {
    if (!std::isnan(value)) {
      sum += value;
      ++count;
    }
  }
  double value() const { return count > 0 ? sum / count : NAN; }
};

}  // namespace

JobNumbers::JobNumbers(const std::vector<RankNumbers>& ranks)
    : world_size(static_cast<int>(ranks.size())) {
  Mean exposed, wait, utilisation, power;
  total.energy_j = 0;
  for (const auto& rank : ranks) {
    total.loss_sum += rank.loss_sum;
    total.loss_samples += rank.loss_samples;
    total.correct += rank.correct;
    total.correct_samples += rank.correct_samples;
    total.samples += rank.samples;
    total.energy_j += rank.energy_j;
    total.seconds = std::max(total.seconds, rank.seconds);
    total.steps = std::max(total.steps, rank.steps);
    total.memory_gib = std::fmax(total.memory_gib, rank.memory_gib);
    exposed.add(rank.exposed_comm_ms);
    wait.add(rank.loader_wait_ms);
    utilisation.add(rank.utilisation);
    power.add(rank.power_w);
  }
  total.exposed_comm_ms = exposed.value();
  total.loader_wait_ms = wait.value();
  total.utilisation = utilisation.value();
  total.power_w = power.value();
  std::vector<std::vector<CustomNumber>> numbers;
  for (const auto& rank : ranks) {
    numbers.push_back(rank.custom);
  }
  custom = reduce_custom(numbers, total.seconds);
}

}  // namespace ddp::detail
