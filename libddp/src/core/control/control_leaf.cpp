// SPDX-License-Identifier: Apache-2.0
#include "core/control/control_leaf.hpp"

#include <stdexcept>

#include "core/control/wire/message_codec.hpp"

namespace ddp::detail {
namespace {

using Clock = std::chrono::steady_clock;

// A failing rank waits this long until its report is sent.
constexpr std::chrono::milliseconds kLastReportTimeout{200};

}  // namespace

JoinedHub join_hub(const std::string& host, int port, const std::string& secret, const Hello& hello,
                   SteadyTime deadline) {
  JoinedHub hub{connect_to_hub(host, port, secret, hello, deadline), {}};
  while (hub.frames.empty()) {
    if (!wait_for(hub.channel.fd(), false, deadline)) {
      throw std::runtime_error("rank 0 does not answer");
    }
    if (hub.channel.receive(hub.frames) == IoStatus::Closed && hub.frames.empty()) {
      throw std::runtime_error(
          "rank 0 refused the connection; is the job's secret (DDP_SECRET) the same on all ranks?");
    }
  }
  return hub;
}

ControlLeaf::ControlLeaf(RankState& state, JoinedHub hub)
    : state_(state), channel_(std::move(hub.channel)), last_heard_(Clock::now()) {
  for (const auto& frame : hub.frames) {
    if (const auto reason = handle(frame); !reason.empty()) {
      throw std::runtime_error("rank 0 " + reason);
    }
  }
}

void ControlLeaf::wait_for_all(JobMonitor::Lock& lock) {
  // Rank 0 enforces the timeout and names missing ranks. Its silence also ends the wait.
  state_.monitor.wait(lock, [this] { return complete_; });
  if (!complete_) {
    state_.monitor.throw_if_failed();
  }
}

void ControlLeaf::send(FrameType type, const std::string& payload) {
  if (!channel_) {
    return;
  }
  channel_->queue(type, payload);
  ++state_.num_frames_sent;
  if (channel_->flush() == IoStatus::WouldBlock) {
    state_.wake.notify();
  }
}

void ControlLeaf::contribute(Contribution contribution) {
  if (contribution.kind == CollectiveKind::Close) {
    close_sequence_ = contribution.sequence;
  }
  const bool gathers =
      contribution.kind == CollectiveKind::AllGather || contribution.kind == CollectiveKind::Gather;
  if (contribution.kind != CollectiveKind::Gather ||
      contribution.root == static_cast<uint32_t>(state_.membership.rank)) {
    expected_results_[contribution.sequence] =
        gathers ? static_cast<uint32_t>(state_.membership.world_size)
                : (contribution.kind == CollectiveKind::Broadcast ? 1 : 0);
  }
  send(FrameType::Contribution, encode_message(contribution));
}

void ControlLeaf::send_progress(const Progress& progress) {
  auto message = progress;
  cut_text(message.where, kMaxPlaceBytes);
  send(FrameType::Progress, encode_message(message));
}

void ControlLeaf::send_position(const RankPosition& position) {
  send(FrameType::Position, encode_position(position));
}

void ControlLeaf::send_exchange(uint64_t key, uint32_t num_ranks, const std::string& value) {
  expected_exchanges_[key] = num_ranks;
  send(FrameType::Exchange, encode_message(ExchangeValue{key, num_ranks, value}));
}

void ControlLeaf::send_failure(const FailureCause& cause) {
  // This rank does not set the cause: rank 0 answers with the job's first one.
  send(FrameType::Failure, encode_cause(cause));
}

void ControlLeaf::add_sockets(std::vector<pollfd>& watched) {
  if (channel_) {
    const int events = POLLIN | (channel_->wants_to_write() ? POLLOUT : 0);
    watched.push_back({channel_->fd(), static_cast<short>(events), 0});
  }
}

void ControlLeaf::serve(const std::vector<pollfd>&, SteadyTime now) {
  if (!channel_) {
    return;
  }
  std::vector<Frame> frames;
  const IoStatus status = channel_->receive(frames);
  if (!frames.empty()) {
    last_heard_ = now;
  }
  for (const auto& frame : frames) {
    if (const auto reason = handle(frame); !reason.empty()) {
      declare_hub_lost(concat("it ", reason, ", which libddp never does"));
      return;
    }
  }
  if (leaving_) {
    channel_.reset();
    return;
  }
  if (status == IoStatus::Closed) {
    declare_hub_lost(channel_->why_closed());
    return;
  }
  if (const auto steady = Clock::now(); steady >= next_heartbeat_) {
    next_heartbeat_ = steady + state_.options.heartbeat_interval;
    channel_->queue(FrameType::Heartbeat, {});
    ++state_.num_frames_sent;
  }
  channel_->flush();
  if (now - last_heard_ > state_.dead_after() && !state_.monitor.is_over()) {
    declare_hub_lost(concat("no sign of life for ", state_.dead_after().count(),
                            " ms (frozen, or its host or network is down)"));
  }
}

std::string ControlLeaf::handle(const Frame& frame) {
  switch (frame.type) {
    case FrameType::Heartbeat:
      return {};
    case FrameType::Welcome:
      if (auto welcome = try_decode_message<Welcome>(frame.payload);
          welcome &&
          welcome->hosts.size() == static_cast<std::size_t>(state_.membership.world_size)) {
        complete_ = true;
        state_.membership.hosts = std::move(welcome->hosts);
        state_.monitor.notify();
        return {};
      }
      break;
    case FrameType::Result:
      if (auto part = try_decode_message<ResultPart>(frame.payload)) {
        return record_result(*std::move(part));
      }
      break;
    case FrameType::Exchanged:
      if (auto result = try_decode_message<ExchangeResult>(frame.payload)) {
        return record_exchange_result(*std::move(result));
      }
      break;
    case FrameType::Failure:
      if (const auto cause = try_decode_message<FailureCause>(frame.payload);
          cause && cause->rank >= -1 && cause->rank < state_.membership.world_size) {
        send_last_report();  // before its communicators abort
        state_.monitor.set_failure(*cause, /*found_here=*/false);
        leaving_ = true;  // rank 0 waits for it before it ends
        return {};
      }
      break;
    case FrameType::ReportRequest:
      if (frame.payload.empty()) {
        send(FrameType::Report, encode_report(state_.position.report()));
        return {};
      }
      break;
    case FrameType::Report:
    case FrameType::Progress:
    case FrameType::Contribution:
    case FrameType::Exchange:
    case FrameType::Position:
      break;  // only the other ranks send them
  }
  return describe_invalid(frame);
}

std::string ControlLeaf::record_result(ResultPart part) {
  const auto expected = expected_results_.find(part.sequence);
  if (expected == expected_results_.end() || expected->second != part.num_values) {
    return concat("sent ", part.num_values, " values for call ", part.sequence,
                  " of this rank, which does not expect them");
  }
  if (part.sequence == close_sequence_) {
    state_.monitor.set_closing();
  }
  if (state_.replies.add_result(std::move(part))) {
    expected_results_.erase(expected);
    state_.monitor.notify();
  }
  return {};
}

std::string ControlLeaf::record_exchange_result(ExchangeResult result) {
  const auto expected = expected_exchanges_.find(result.key);
  if (expected == expected_exchanges_.end() || expected->second != result.values.size()) {
    return concat("sent ", result.values.size(),
                  " values of an exchange that this rank does not expect");
  }
  expected_exchanges_.erase(expected);
  state_.replies.add_exchanged(result.key, std::move(result.values));
  state_.monitor.notify();
  return {};
}

void ControlLeaf::send_last_report() {
  send(FrameType::Report, encode_report(state_.position.report()));
  const auto deadline = Clock::now() + kLastReportTimeout;
  while (channel_ && channel_->wants_to_write() && wait_for(channel_->fd(), true, deadline) &&
         channel_->flush() != IoStatus::Closed) {
  }
}

void ControlLeaf::declare_hub_lost(const std::string& why) {
  channel_.reset();
  state_.monitor.notify();
  if (state_.monitor.is_over()) {
    return;
  }
  FailureCause cause;
  cause.rank = 0;
  cause.host = complete_ ? state_.membership.hosts[0] : "";
  // Rank 0 sends its place to nobody. Replicas are about equally far.
  const auto reached = state_.progress.get();
  cause.step = reached.step;
  cause.where = reached.where;
  cause.message = why + "; step and place are those of the rank that noticed";
  state_.monitor.set_failure(state_.cause_of_loss(cause), /*found_here=*/true);
}

void ControlLeaf::wait_for_peers_to_leave(JobMonitor::Lock&) {
  // The background thread closes the socket, because it may be polling it. Rank 0 waits for this.
  leaving_ = true;
  state_.wake.notify();
}

}  // namespace ddp::detail
