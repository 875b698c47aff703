// SPDX-License-Identifier: Apache-2.0
// Parts of a control plane of several ranks, which ddp::ControlPlane gives to the library.
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

/// The thread that serves the connections when the end of a Context is not its own end.
class BackgroundService {
 public:
  virtual ~BackgroundService() = default;
  /// Ends the thread when the process exits after a failure, of which the other ranks know by then
  /// or were given two seconds to know. Objects that refer to this plane may stay; their calls
  /// throw the failure.
  virtual void stop() = 0;
  /// Called when the context ends and this control plane stays open. Removes all failure callbacks
  /// and probes.
  virtual void outlive_context() = 0;
};

}  // namespace ddp::detail
