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

/// Short texts that ranks announce to each other without waiting. Any thread.
///
/// Captures of a GraphedStep need them: replays exchange nothing, so a rank that replays would
/// never notice a rank that waits for it to capture (train/graph/capture_agreement.hpp).
class AnnouncementBoard {
 public:
  static constexpr std::size_t kMaxAnnouncementBytes = 4096;

  virtual ~AnnouncementBoard() = default;
  /// Replaces this rank's announcement by the first kMaxAnnouncementBytes of `text`. It arrives
  /// some time later, or never if the job fails.
  virtual void announce(const std::string& text) = 0;
  /// Indexed by rank; empty if a rank has announced nothing.
  virtual std::vector<std::string> announcements() const = 0;
  /// Changes whenever announcements() changes. Takes no lock.
  virtual uint64_t announcements_version() const = 0;
};

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
