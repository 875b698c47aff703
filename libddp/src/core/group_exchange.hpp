// SPDX-License-Identifier: Apache-2.0
// Small values exchanged by some ranks of the job, in any order relative to other exchanges.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace ddp::detail {

/// Also implemented by a control plane of several ranks. Any thread.
class GroupExchange {
 public:
  static constexpr std::size_t kMaxExchangeBytes = 512;

  virtual ~GroupExchange() = default;
  /// Returns the values of the `num_ranks` ranks that call this with `key`, by rank of the job.
  /// Each key is used once. Values are cut at kMaxExchangeBytes. The host waits and calls `look` a
  /// few times a second; `look` ends the wait by throwing. Throws the job's failure.
  virtual std::map<int, std::string> exchange(uint64_t key, int num_ranks, const std::string& value,
                                              const std::function<void()>& look) = 0;
};

}  // namespace ddp::detail
