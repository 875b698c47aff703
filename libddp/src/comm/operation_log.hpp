// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddp::detail {

/// Also implemented by a communicator whose collectives can be captured.
class OperationLog {
 public:
  virtual ~OperationLog() = default;
  /// Operations called so far on this rank, including captured ones.
  virtual int64_t num_operations() const = 0;
  /// Collectives of the latest capture with numbers above `after` (see num_operations), in order:
  /// "all_reduce of 1024 Float". Equal strings mean equal calls.
  virtual std::vector<std::string> captured_operations(int64_t after) const = 0;
  /// Until join_counts(), waiting for a captured collective does not wait for its count.
  virtual void hold_counts() = 0;
  /// Makes the current stream wait for the held counts. Does nothing if the capture was broken off.
  virtual void join_counts() = 0;
};

}  // namespace ddp::detail
