// SPDX-License-Identifier: Apache-2.0
// Detects that a communicator's collectives do not end or fail, then reports and aborts. Free of
// LibTorch and CUDA.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/abort_state.hpp"
#include "comm/collective_failure.hpp"
#include "comm/step_timeouts.hpp"
#include "comm/watchdog_core.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {

/// One thread calls look().
class FailureDetector {
 public:
  struct Watched {
    std::string name;  ///< "the nccl communicator"
    int rank = 0;
    int world_size = 1;
    std::function<std::vector<LaneProgress>()> lanes;
    std::function<std::string(const Stall&)> describe;  ///< the collective that did not end
    /// Throws an error that the backend found itself. Returns false if nothing can fail any more.
    std::function<bool()> poll_async_error;
    std::function<void(const std::string& reason)> abort;
  };

  /// `on_failure` may be null.
  FailureDetector(Watched watched, CollectiveFailureHandler on_failure,
                  std::shared_ptr<const StepTimeouts> timeouts,
                  std::shared_ptr<const AbortState> state)
      : watched_(std::move(watched)),
        on_failure_(std::move(on_failure)),
        timeouts_(std::move(timeouts)),
        state_(std::move(state)) {}

  /// Checks for stalled counters, then for the backend's own errors. Returns false when no further
  /// check is needed.
  bool look(StallDetector::TimePoint now = std::chrono::steady_clock::now()) {
    if (const auto stall = stalls_.look(watched_.lanes(), now, timeouts_->current())) {
      const auto what = concat(watched_.describe(*stall), " of ", watched_.name, ", rank ",
                               watched_.rank, " of ", watched_.world_size);
      fail(what, concat(what, ": no collective ended for ", stall->stood.count(),
                        " ms: a peer is lost, stuck, or makes other calls than this rank"));
      return false;
    }
    try {
      return watched_.poll_async_error();
    } catch (const std::exception& error) {
      fail("a collective of " + watched_.name, error.what());
    }
    return false;
  }

 private:
  void fail(const std::string& collective, const std::string& message) {
    if (state_->aborted()) {
      return;
    }
    log_error(message);
    // Peers are notified before this rank throws.
    if (on_failure_) {
      on_failure_({collective, timeouts_->step(), std::make_exception_ptr(PeerLostError(message))});
    }
    watched_.abort(message);
  }

  const Watched watched_;
  const CollectiveFailureHandler on_failure_;
  const std::shared_ptr<const StepTimeouts> timeouts_;
  const std::shared_ptr<const AbortState> state_;
  StallDetector stalls_{std::chrono::seconds(5)};
};

}  // namespace ddp::detail
