// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddp::detail {

/// What a communicator whose collectives can be captured is too.
class OperationLog {
 public:
  virtual ~OperationLog() = default;
  /// The latest capture's collectives with numbers above `after` (Communicator::num_operations), in
  /// order: "all_reduce of 1024 Float". Equal texts need the same call on every rank.
  virtual std::vector<std::string> captured_operations(int64_t after) const = 0;
  /// Until join_counts() nobody who waits for a captured collective also waits until it is counted.
  virtual void hold_counts() = 0;
  /// The current stream waits for what was held; where the capture broke off, nothing is captured
  /// and it waits for nothing.
  virtual void join_counts() = 0;
};

}  // namespace ddp::detail
