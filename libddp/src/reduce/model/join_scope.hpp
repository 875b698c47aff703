// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "ddp/reduce/join.hpp"

namespace ddp {

/// Announces this rank's forwards, then shadows the other ranks' forwards in finish(). Use join()
/// instead.
class JoinScope {
 public:
  JoinScope(DataParallelModel& model, const JoinOptions& options);
  ~JoinScope();
  JoinScope(const JoinScope&) = delete;
  JoinScope& operator=(const JoinScope&) = delete;

  /// Announces a forward of this rank. Collective with announce_forward() or finish() of the
  /// others.
  void announce_forward(bool synchronised, bool sends_buffers);
  /// The rank whose buffers are sent: the highest one that still has input.
  int buffer_root() const { return highest_active_; }
  bool is_weighted() const { return options_.weighted; }
  /// Call when this rank ran out. Joins with zeros until all ranks have run out. Then the highest
  /// rank that was active last sends its model to all. Collective.
  void finish();

 private:
  std::vector<int64_t> exchange(int64_t flags);
  void apply(const std::vector<int64_t>& flags);

  DataParallelModel& model_;
  JoinOptions options_;
  int highest_active_ = 0;
  bool uneven_ = false;                 // a rank ran out before another
  int64_t passes_before_forward_ = -1;  // before the last synchronised forward here
};

}  // namespace ddp
