// SPDX-License-Identifier: Apache-2.0
// Numbers of one rank, and of all ranks of the job. Torch-free.
#pragma once

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "train/metrics/custom_numbers.hpp"
#include "train/metrics/ranks/rank_devices.hpp"

namespace ddp::detail {

/// What a rank adds to a line or row.
struct RankNumbers {
  double loss_sum = 0;
  double loss_samples = 0;
  double correct = 0;
  double correct_samples = 0;
  double samples = 0;  ///< in `seconds`
  double seconds = 0;
  double steps = 0;  ///< in `seconds`
  double exposed_comm_ms = NAN;
  double loader_wait_ms = NAN;
  double memory_gib = NAN;
  double utilisation = NAN;
  double power_w = NAN;
  double energy_j = NAN;  ///< in `seconds`
  std::vector<CustomNumber> custom = {};
  std::optional<RankDevice> device = {};  ///< of a line

  friend auto message_fields(RankNumbers& n) {
    return std::tie(n.loss_sum, n.loss_samples, n.correct, n.correct_samples, n.samples, n.seconds,
                    n.steps, n.exposed_comm_ms, n.loader_wait_ms, n.memory_gib, n.utilisation,
                    n.power_w, n.energy_j, n.custom, n.device);
  }
};

/// Sums, maxima and means over ranks; means omit ranks without the value.
struct JobNumbers {
  /// Throws as reduce_custom() does.
  explicit JobNumbers(const std::vector<RankNumbers>& ranks);
  RankNumbers total;  ///< sums (energy too; NaN if unknown on a rank); seconds, steps and memory:
                      ///< the maximum
  int world_size;
  std::vector<CustomResult> custom;

  std::optional<double> loss() const { return ratio(total.loss_sum, total.loss_samples); }
  std::optional<double> accuracy() const { return ratio(total.correct, total.correct_samples); }
  double samples_per_second() const {
    return total.seconds > 0 && total.samples > 0 ? total.samples / total.seconds : NAN;
  }
  double step_ms() const { return total.steps > 0 ? 1000 * total.seconds / total.steps : NAN; }

 private:
  static std::optional<double> ratio(double sum, double count) {
    return count > 0 ? std::optional(sum / count) : std::nullopt;
  }
};

}  // namespace ddp::detail
