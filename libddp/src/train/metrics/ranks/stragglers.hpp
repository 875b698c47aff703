// SPDX-License-Identifier: Apache-2.0
// Ranks for which the others wait, from the numbers of logging steps. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "train/metrics/ranks/metrics_ranks.hpp"

namespace ddp::detail {

struct Straggler {
  int64_t since_step = -1;  ///< the first slow logging step in a row; -1: the rank is none
  std::string cause;        ///< "its loader made it wait 20.1 ms a step (others 0.0)"
};

/// A rank is busy while it does not wait for reductions. It is slow in a logging step in which it
/// is busy 1.5 times as long as the median of the others, or 1.1 times with a GPU at less than 0.9
/// times their clock. After three of these in a row it is a straggler, and after three others no
/// longer.
class Stragglers {
 public:
  /// What the log says of ranks that became or ceased to be stragglers with this logging step.
  struct News {
    std::string warning;  ///< empty: nothing
    std::string info;
  };
  News add(int64_t step, const std::vector<RankNumbers>& ranks);

  /// By rank; empty before the first step.
  const std::vector<Straggler>& ranks() const { return stragglers_; }

 private:
  struct Streak {
    int num_slow = 0, num_usual = 0;
    int64_t first_slow_step = -1;
  };

  std::vector<Straggler> stragglers_;
  std::vector<Streak> streaks_;
};

}  // namespace ddp::detail
