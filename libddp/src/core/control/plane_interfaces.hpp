// SPDX-License-Identifier: Apache-2.0
// Interfaces that a control plane of several ranks implements besides ddp::ControlPlane. Their
// users find them by dynamic_cast.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace ddp::detail {

/// Small values that some ranks of the job exchange, in any order relative to other exchanges. Any
/// thread.
class GroupExchange {
 public:
  static constexpr std::size_t kMaxExchangeBytes = 512;

  virtual ~GroupExchange() = default;
  /// Returns the values of the `num_ranks` ranks that call this with `key`, by rank of the job.
  /// Each key is used once. Values are cut at kMaxExchangeBytes. The host waits and calls `poll` a
  /// few times per second; `poll` ends the wait by throwing. Throws the job's failure.
  virtual std::map<int, std::string> exchange(uint64_t key, int num_ranks, const std::string& value,
                                              const std::function<void()>& poll) = 0;
};

}  // namespace ddp::detail
