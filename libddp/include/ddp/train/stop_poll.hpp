// SPDX-License-Identifier: Apache-2.0
// Stopping inside long work between two steps, for example an evaluation:
//
//   ddp::StopPoll poll(ctx, cfg.checkpoint.stop_check_seconds, "evaluation");
//   for (auto& batch : eval_loader) {
//     …
//     if (poll.should_stop()) {
//       break;
//     }
//   }
//   if (poll.finish()) {
//     checkpointer.stop(step, poll.stop_reason());  // saves the last step, throws ddp::Stop
//   }
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "ddp/comm/context.hpp"
#include "ddp/core/stop_signal.hpp"

namespace ddp {

namespace detail {
class ExchangePace;
}

/// Lets all ranks agree on a stop request of any rank. Ranks may have different numbers of batches:
/// a rank that has finished waits for the others in finish(). Other collectives between the ranks'
/// first should_stop() and finish() must be equal on all ranks.
class StopPoll {
 public:
  /// `activity` names the work in messages. Ranks compare their requests every `seconds` or, if
  /// that takes over 2 % of the time, more rarely: at least every 5 * `seconds`.
  StopPoll(const Context& context, double seconds, const std::string& activity);
  /// The same without a Context. `stop_requested` tests for a request on this rank.
  StopPoll(ControlPlane& control_plane, double seconds, const std::string& activity,
           std::function<bool()> stop_requested = ddp::stop_requested);

  ~StopPoll();

  /// Call between batches. Returns true once the ranks have agreed on a stop. Until then, a call
  /// that is due compares the requests, and the host waits. Other calls cost nothing.
  bool should_stop();
  /// Call after the last batch, or after should_stop() returned true. Waits until every rank has
  /// done so. Returns whether the work was stopped, equal on all ranks. Collective.
  bool finish();
  /// "rank 1 was asked to stop"; empty without a stop. Equal on all ranks.
  const std::string& stop_reason() const { return stop_reason_; }

 private:
  using Clock = std::chrono::steady_clock;
  /// Returns whether every rank has finished its work.
  bool exchange(bool has_finished);

  ControlPlane& control_plane_;
  const std::chrono::duration<double> interval_;
  const std::string activity_;
  const std::function<bool()> stop_requested_;
  const std::unique_ptr<detail::ExchangePace> pace_;
  Clock::time_point due_;
  std::string stop_reason_;
};

}  // namespace ddp
