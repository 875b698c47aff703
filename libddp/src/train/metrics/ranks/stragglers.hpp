// SPDX-License-Identifier: Apache-2.0
// Ranks for which the others wait, from the numbers of logging steps. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "train/metrics/ranks/metrics_ranks.hpp"

namespace ddp::detail {

/// A rank is busy for the mean step's time without its wait for reductions in the last backward.
/// Other waits count as busy: for a barrier, SyncBatchNorm or check_collectives. So does work that
/// a rank does in logging steps alone, as if it did it in every step.
///
/// A rank is slow in a logging step in which it is busy 1.5 times as long as the median of the
/// others and a tenth of the step longer, or with a GPU at less than 0.9 times their clock 1.1
/// times as long and a twentieth of the step longer. After three such logging steps in a row it is
/// a straggler, if it was busy 50 ms longer in all of their steps together: a host that was busy
/// elsewhere for a moment slows short steps down. After three others in a row it is no longer one.
/// Steps with an unknown time do not count.
class Stragglers {
 public:
  /// What the log says of ranks that became or ceased to be stragglers; one line a rank.
  struct Messages {
    std::vector<std::string> warnings;
    std::vector<std::string> infos;
  };
  Messages add(int64_t step, const std::vector<RankNumbers>& ranks);

  /// By rank; empty before the first step.
  const std::vector<Straggler>& ranks() const { return stragglers_; }

 private:
  struct Streak {
    int num_slow = 0, num_usual = 0;
    int64_t first_slow_step = -1;
    double excess_ms = 0;  // of all steps since then
  };

  std::vector<Straggler> stragglers_;
  std::vector<Streak> streaks_;
};

}  // namespace ddp::detail
