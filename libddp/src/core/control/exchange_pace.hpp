// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <utility>

namespace ddp::detail {

/// Pause between exchanges of all ranks: exchanges take at most 1/50 of the time, and the pause is
/// at most five intervals. Uses the shorter of the last two durations, because one may include a
/// wait for a slow rank.
class ExchangePace {
 public:
  using Seconds = std::chrono::duration<double>;
  void note(Seconds exchange) { last_ = std::exchange(newest_, exchange); }
  /// From the end of one exchange to the start of the next.
  Seconds pause(Seconds interval) const {
    const auto exchange = std::min(last_, newest_);
    return std::min(std::max(interval - exchange, 49 * exchange), 5 * interval);
  }

 private:
  Seconds last_{0}, newest_{0};
};

}  // namespace ddp::detail
