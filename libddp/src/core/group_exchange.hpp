// SPDX-License-Identifier: Apache-2.0
// Small values exchanged by some ranks of the job, in whatever order other ranks exchange theirs.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace ddp::detail {

/// What a control plane of several ranks is too. Any thread.
class GroupExchange {
 public:
  static constexpr std::size_t kMaxExchangeBytes = 512;

  virtual ~GroupExchange() = default;
  /// The values, by rank of the job, of the `num_ranks` ranks that call this with `key`. A key is
  /// used once. A value is cut at kMaxExchangeBytes. The host waits; `look` is called a few times
  /// a second meanwhile, and ends the wait by throwing. Throws the job's failure.
  virtual std::map<int, std::string> exchange(uint64_t key, int num_ranks, const std::string& value,
                                              const std::function<void()>& look) = 0;
};

}  // namespace ddp::detail
