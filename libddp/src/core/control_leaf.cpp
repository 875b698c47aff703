// SPDX-License-Identifier: Apache-2.0
#include "core/control_leaf.hpp"

#include <stdexcept>

#include "core/byte_codec.hpp"

namespace ddp::detail {
namespace {

using Clock = std::chrono::steady_clock;

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

ControlLeaf::ControlLeaf(const LaunchEnvironment& launch, const ControlPlaneOptions& options,
                         JoinedHub hub)
    : ControlPlaneBase(launch, options),
      channel_(std::move(hub.channel)),
      last_heard_(Clock::now()) {
  for (const auto& frame : hub.frames) {
    handle(frame);
  }
  start_thread();
}

ControlLeaf::~ControlLeaf() {
  leave_without_closing();
  stop_thread();
}

void ControlLeaf::wait_for_all() {
  std::unique_lock lock(mutex_);
  // Rank 0 enforces the timeout and names missing ranks; its silence ends the wait too.
  changed_.wait(lock, [this] { return complete_ || failure_.failed(); });
  if (!complete_) {
    throw_failure(failure_.get());
  }
}

void ControlLeaf::send(FrameType type, const std::string& payload) {
  if (!channel_) {
    return;
  }
  channel_->queue(type, payload);
  ++num_frames_;
  if (channel_->flush() == IoStatus::WouldBlock) {
    wake_.notify();
  }
}

void ControlLeaf::contribute(Contribution contribution) {
  if (contribution.kind == CollectiveKind::Close) {
    close_sequence_ = contribution.sequence;
  }
  send(FrameType::Contribution, encode_contribution(contribution));
}

void ControlLeaf::send_progress(const Progress& progress) {
  ByteWriter writer;
  writer.signed_number(progress.step).text(progress.where.substr(0, 1024));
  send(FrameType::Progress, writer.take());
}

void ControlLeaf::send_position(const RankPosition& position) {
  send(FrameType::Position, encode_position(position));
}

void ControlLeaf::send_note(const std::string& text) {
  ByteWriter writer;
  send(FrameType::Note, writer.number(static_cast<uint32_t>(rank_)).text(text).take());
}

void ControlLeaf::send_failure(const FailureCause& cause) {
  // Not set here: rank 0 answers with the job's first cause.
  send(FrameType::Failure, encode_cause(cause));
}

void ControlLeaf::add_sockets(std::vector<pollfd>& watched) {
  if (channel_) {
    const int events = POLLIN | (channel_->wants_to_write() ? POLLOUT : 0);
    watched.push_back({channel_->fd(), static_cast<short>(events), 0});
  }
}

void ControlLeaf::serve(const std::vector<pollfd>&, SteadyTime now) {
  if (leaving_) {
    channel_.reset();
  }
  if (!channel_) {
    return;
  }
  std::vector<Frame> frames;
  const IoStatus status = channel_->receive(frames);
  if (!frames.empty()) {
    last_heard_ = now;
  }
  for (const auto& frame : frames) {
    handle(frame);
  }
  if (status == IoStatus::Closed) {
    lose_hub(channel_->problem().empty()
                 ? "its connection closed without a word (killed, crashed, or its host failed)"
                 : channel_->problem());
    return;
  }
  if (const auto steady = Clock::now(); steady >= next_heartbeat_) {
    next_heartbeat_ = steady + options_.heartbeat_interval;
    channel_->queue(FrameType::Heartbeat, {});
    ++num_frames_;
  }
  channel_->flush();
  if (now - last_heard_ > dead_after() && !failure_.failed() && !closing_) {
    lose_hub(concat("no sign of life for ", dead_after().count(),
                    " ms (frozen, or its host or network is down)"));
  }
}

void ControlLeaf::handle(const Frame& frame) {
  if (frame.type == FrameType::Welcome) {
    complete_ = true;
    hub_host_ = frame.payload;
    changed_.notify_all();
  } else if (frame.type == FrameType::Result) {
    ResultPart part;
    if (decode_result(frame.payload, static_cast<uint32_t>(world_size_), part)) {
      closing_ = closing_ || part.sequence == close_sequence_;
      note_result(std::move(part));
    }
  } else if (frame.type == FrameType::Note) {
    ByteReader reader(frame.payload);
    const auto rank = reader.number<uint32_t>();
    auto text = reader.text();
    if (reader.finished() && rank < static_cast<uint32_t>(world_size_)) {
      keep_note(static_cast<int>(rank), std::move(text));
    }
  } else if (frame.type == FrameType::Exchanged) {
    handle_exchanged(frame);
  } else if (frame.type == FrameType::Failure) {
    FailureCause cause;
    if (decode_cause(frame.payload, cause) && failure_.set(cause)) {
      changed_.notify_all();
    }
  }
}

void ControlLeaf::lose_hub(const std::string& why) {
  channel_.reset();
  changed_.notify_all();
  if (closing_ || failure_.failed()) {
    return;
  }
  FailureCause cause;
  cause.rank = 0;
  cause.host = hub_host_;
  const auto reached = progress();
  cause.step = reached.step;
  cause.where = reached.where;
  cause.message = why;
  if (failure_.set(cause)) {
    first_cause_is_ours_ = true;
    changed_.notify_all();
  }
}

void ControlLeaf::wait_for_peers_to_leave(std::unique_lock<std::mutex>&) {
  leaving_ = true;  // the background thread closes the socket, as it may be polling it; rank 0
                    // waits for this
  wake_.notify();
}

}  // namespace ddp::detail
