// SPDX-License-Identifier: Apache-2.0
// Where a rank stands: which collective it waits for, on which communicator. From the positions of
// all ranks rank 0 tells who waits for whom for ever (control_verdict.hpp).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// The thread that made all calls; none where several did. The default id stands for no call.
using CallerThread = std::optional<std::thread::id>;

inline void add_caller(CallerThread& callers, CallerThread more = std::this_thread::get_id()) {
  if (callers == std::thread::id()) {
    callers = more;
  } else if (more != std::thread::id() && more != callers) {
    callers.reset();
  }
}

/// How far this rank came with the collectives of one communicator. send and recv are not counted:
/// only two ranks make them.
struct GroupPosition {
  std::string id = {};      ///< the same on all ranks of the group, and no other group's
  uint64_t num_called = 0;  ///< collectives called so far; the first has number 1
  uint64_t pending = 0;     ///< number of one that was called and has not ended; 0: none
  /// Of the pending one: "all_reduce (sum of 8 Float)". Equal texts need the same call on every
  /// rank.
  std::string operation = {};
  uint64_t waited = 0;  ///< number of the newest that a thread waits for without limit; 0: none
  /// The collectives are comparisons of calls (check_collectives). Calls that differ are no
  /// deadlock: the comparison reports them.
  bool is_check = false;
  CallerThread caller = std::thread::id();  ///< stays on this rank

  bool operator==(const GroupPosition&) const = default;
};

struct RankPosition {
  int64_t step = -1;
  std::string where;        ///< as set_progress said, and the activity
  uint64_t plane_call = 0;  ///< 1 + the sequence number of the control plane's collective it is in
  /// All collectives, the control plane's too, were called by one thread: while that one waits,
  /// none is called.
  bool one_thread = true;
  std::vector<GroupPosition> groups;

  bool waits() const;
  const GroupPosition* find(std::string_view id) const;
  bool operator==(const RankPosition&) const = default;
};

std::string encode_position(const RankPosition& position);
bool decode_position(std::string_view bytes, RankPosition& position);

/// What a control plane of several ranks is too. Any thread.
class PositionBoard {
 public:
  /// Asked a few times a second by a background thread, so it must not wait for collectives.
  /// Nothing: the communicator is gone, and is not asked again.
  using Probe = std::function<std::optional<GroupPosition>()>;

  virtual ~PositionBoard() = default;
  virtual void add_probe(Probe probe) = 0;
  /// Returns what it replaces.
  virtual std::string set_activity(std::string activity) = 0;
  /// The context ends and this control plane stays open: removes the failure callbacks and probes
  /// of the context and of the program.
  virtual void outlive_context() = 0;
};

/// Given a probe of each communicator that is made; may be empty.
using WatchPosition = std::function<void(PositionBoard::Probe)>;

/// Says what this rank is busy with ("save"): peers read it where they wait for this rank. The
/// collectives of the control plane that are called meanwhile belong to it: another rank that calls
/// one of another activity in its place took another way.
class ActivityScope {
 public:
  ActivityScope(ControlPlane& control_plane, std::string activity);
  ~ActivityScope();
  ActivityScope(const ActivityScope&) = delete;
  ActivityScope& operator=(const ActivityScope&) = delete;

 private:
  PositionBoard* const board_;
  std::string before_;
};

/// The activity of a rank that ends: it calls no collective of a communicator any more.
inline constexpr const char* kCloseActivity = "close";
/// The activity of a rank whose last context was closed, until its process ends.
inline constexpr const char* kAfterCloseActivity = "after close";

}  // namespace ddp::detail
