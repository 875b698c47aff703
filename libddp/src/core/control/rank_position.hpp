// SPDX-License-Identifier: Apache-2.0
// A rank's position: which collective it waits for, on which communicator. Rank 0 finds deadlocks
// from all positions (hub/deadlock.hpp).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "core/control/group_history.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// The thread that made all calls; nothing if several threads did. The default id stands for no
/// call.
using CallerThread = std::optional<std::thread::id>;

inline void add_caller(CallerThread& callers, CallerThread more = std::this_thread::get_id()) {
  if (callers == std::thread::id()) {
    callers = more;
  } else if (more != std::thread::id() && more != callers) {
    callers.reset();
  }
}

/// Limits of what a rank reports about itself. Rank 0 stores one report per rank.
inline constexpr std::size_t kMaxPlaceBytes = 1024;
inline constexpr std::size_t kMaxPositionGroups = 256;

/// Adds what a call is for: "all_reduce (8 Float; bucket 4: …)". `label` may be empty.
std::string with_label(std::string call, const std::string& label);

/// This rank's progress in the collectives of one communicator. send and recv are not counted,
/// because only two ranks call them.
struct GroupPosition {
  std::string id = {};      ///< equal on all ranks of the group, unique to the group
  uint64_t num_called = 0;  ///< collectives called so far; the first has number 1
  uint64_t pending = 0;     ///< number of a collective that was called and has not ended; 0: none
  /// The pending collective: "all_reduce (sum of 8 Float)". Equal strings mean equal calls.
  std::string operation = {};
  std::string label = {};  ///< what it is for: "bucket 4: conv1.weight … bn1.bias"; may be empty
  uint64_t waited = 0;     ///< newest number that a thread waits for without limit; 0: none
  /// The collectives are comparisons of calls (check_collectives). Different calls are not a
  /// deadlock: the comparison reports them.
  bool is_check = false;
  CallerThread caller = std::thread::id();  ///< not sent to other ranks
  /// The communicator was destroyed, so `num_called` is final. Not sent to other ranks.
  bool is_closed = false;

  bool is_valid() const {
    return id.size() <= kMaxPlaceBytes && operation.size() <= kMaxPlaceBytes &&
           label.size() <= kMaxPlaceBytes;
  }
  bool operator==(const GroupPosition&) const = default;
  friend auto message_fields(GroupPosition& group) {
    return std::tie(group.id, group.num_called, group.pending, group.operation, group.label,
                    group.waited, group.is_check);
  }
};

struct RankPosition {
  int64_t step = -1;
  std::string where;        ///< the place from set_progress, and the activity
  uint64_t plane_call = 0;  ///< 1 + sequence number of its current control-plane collective
  /// One thread called all collectives, including the control plane's. While that thread waits,
  /// none is called.
  bool one_thread = true;
  std::vector<GroupPosition> groups;

  bool waits() const;
  const GroupPosition* find(std::string_view id) const;
  bool is_valid() const {
    return where.size() <= kMaxPlaceBytes && groups.size() <= kMaxPositionGroups;
  }
  bool operator==(const RankPosition&) const = default;
  friend auto message_fields(RankPosition& position) {
    return std::tie(position.step, position.where, position.plane_call, position.one_thread,
                    position.groups);
  }
};

/// The activity of ranks that compare a changed requires_grad; the parameter's name follows.
inline constexpr std::string_view kFrozenActivity = "requires_grad of ";

/// Cuts `text` to at most `size` bytes, between characters of UTF-8.
void cut_text(std::string& text, std::size_t size);
/// Cuts texts and lists that exceed the limits.
void cut_to_limits(RankPosition& position);
/// The message of `position` without what exceeds the limits: positions are only a diagnostic.
std::string encode_position(RankPosition position);

/// Where a rank reports its position: part of a control plane of several ranks. Any thread.
class PositionBoard {
 public:
  /// A background thread calls it a few times per second, so it must not wait for collectives.
  /// After it returned a closed position it is not called again, and that position stays.
  class Probe {
   public:
    template <typename Position>
    Probe(Position position, std::function<GroupHistory()> history = {})  // NOLINT: a function
        : position_(std::move(position)), history_(std::move(history)) {}
    GroupPosition operator()() const { return position_(); }
    /// Its recent collectives, for a report.
    GroupHistory history() const { return history_ ? history_() : GroupHistory(); }

   private:
    std::function<GroupPosition()> position_;
    std::function<GroupHistory()> history_;
  };

  virtual ~PositionBoard() = default;
  virtual void add_probe(Probe probe) = 0;
  /// Returns the previous activity.
  virtual std::string set_activity(std::string activity) = 0;
};

/// Reads the position of an object without owning it, so the control plane's thread never destroys
/// the object. Any thread.
class PositionSource {
 public:
  explicit PositionSource(std::function<GroupPosition()> read,
                          std::function<GroupHistory()> history = {})
      : read_(std::move(read)), history_(std::move(history)) {}

  GroupPosition read() {
    const std::lock_guard lock(mutex_);
    return read_ ? read_() : last_;
  }
  GroupHistory history() {
    const std::lock_guard lock(mutex_);
    return read_ && history_ ? history_() : GroupHistory();
  }
  /// The object's destructor calls this first. Waits for a read() in progress. From now on read()
  /// returns the last counts: a rank that destroyed a communicator calls nothing more on it, which
  /// its peers may wait for.
  void close() {
    const std::lock_guard lock(mutex_);
    if (!read_) {
      return;
    }
    const auto last = std::exchange(read_, nullptr)();
    last_ = {
        .id = last.id, .num_called = last.num_called, .is_check = last.is_check, .is_closed = true};
  }

 private:
  std::mutex mutex_;
  std::function<GroupPosition()> read_;
  std::function<GroupHistory()> history_;
  GroupPosition last_;
};

/// Probes the object of `source`.
inline PositionBoard::Probe probe_of(const std::shared_ptr<PositionSource>& source) {
  return {[source] { return source->read(); }, [source] { return source->history(); }};
}

/// Receives a probe of each new communicator; may be empty.
using AddProbe = std::function<void(PositionBoard::Probe)>;

/// While it lives, this thread runs a loop that ranks may leave at different steps: join(model,
/// loop). The ranks that left answer forwards only, so an ActivityScope on this thread throws.
class UnevenLoop {
 public:
  UnevenLoop();
  ~UnevenLoop();
  UnevenLoop(const UnevenLoop&) = delete;
  UnevenLoop& operator=(const UnevenLoop&) = delete;
};

/// Throws SettingsError inside an UnevenLoop: the ranks that left it would miss `call`.
void refuse_in_uneven_loop(const std::string& call);

/// Sets this rank's activity ("save"), which peers see while they wait for this rank. Control-plane
/// collectives called in the scope belong to it. If ranks call the same collective in different
/// activities, their control flow has diverged.
class ActivityScope {
 public:
  /// Throws SettingsError inside an UnevenLoop of several ranks.
  ActivityScope(ControlPlane& control_plane, std::string activity);
  ~ActivityScope();
  ActivityScope(const ActivityScope&) = delete;
  ActivityScope& operator=(const ActivityScope&) = delete;

 private:
  PositionBoard* const board_;
  std::string before_;
};

/// The activity of a rank that ends: it calls no more collectives of a communicator.
inline constexpr const char* kCloseActivity = "close";
/// The activity of a rank after its last context closed, until its process ends.
inline constexpr const char* kAfterCloseActivity = "after close";

}  // namespace ddp::detail
