// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/stop_poll.hpp"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/control/exchange_pace.hpp"
#include "core/control/rank_position.hpp"
#include "core/control/wire/message_codec.hpp"
#include "train/checkpoint/checkpoint_exchange.hpp"

namespace ddp {
namespace {

struct RankRequest {
  bool stops = false;
  bool has_finished = false;
  friend auto message_fields(RankRequest& request) {
    return std::tie(request.stops, request.has_finished);
  }
};

struct Agreement {
  std::string reason;  // empty without a stop
  bool all_finished = true;
  friend auto message_fields(Agreement& agreement) {
    return std::tie(agreement.reason, agreement.all_finished);
  }
};

Agreement agree(const std::vector<RankRequest>& requests) {
  return {.reason = detail::stop_reason(requests, &RankRequest::stops),
          .all_finished = std::all_of(requests.begin(), requests.end(),
                                      [](const auto& request) { return request.has_finished; })};
}

}  // namespace

StopPoll::StopPoll(const Context& context, double seconds, const std::string& activity)
    : StopPoll(context.control_plane(), seconds, activity) {}

StopPoll::StopPoll(ControlPlane& control_plane, double seconds, const std::string& activity,
                   std::function<bool()> stop_requested)
    : control_plane_(control_plane),
      interval_(seconds),
      activity_(activity),
      stop_requested_(std::move(stop_requested)),
      pace_(std::make_unique<detail::ExchangePace>()),
      due_(Clock::now() + std::chrono::duration_cast<Clock::duration>(interval_)) {}

StopPoll::~StopPoll() = default;

bool StopPoll::should_stop() {
  if (stop_reason_.empty() && Clock::now() >= due_) {
    exchange(/*has_finished=*/false);
  }
  return !stop_reason_.empty();
}

bool StopPoll::finish() {
  while (stop_reason_.empty() && !exchange(/*has_finished=*/true)) {
  }
  return !stop_reason_.empty();
}

// A rank's exchange ends with the slowest rank's, so all ranks have made equally many.
bool StopPoll::exchange(bool has_finished) {
  const detail::ActivityScope scope(control_plane_, activity_);
  const auto begin = Clock::now();
  const auto requests = detail::gather_messages(
      control_plane_, RankRequest{.stops = stop_requested_(), .has_finished = has_finished});
  const auto agreed = detail::broadcast_message(control_plane_, agree(requests));
  stop_reason_ = agreed.reason;
  const auto end = Clock::now();
  pace_->note(end - begin);
  due_ = end + std::chrono::duration_cast<Clock::duration>(pace_->pause(interval_));
  return agreed.all_finished;
}

}  // namespace ddp
