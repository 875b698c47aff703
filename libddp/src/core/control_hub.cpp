// SPDX-License-Identifier: Apache-2.0
#include "core/control_hub.hpp"

#include <unistd.h>

#include <algorithm>

#include "core/byte_codec.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

using Clock = std::chrono::steady_clock;

// Limits on the time and number of unauthenticated connections ("strangers").
constexpr std::chrono::seconds kHandshakeTimeout{5};
constexpr std::size_t kMaxNewcomers = 512;
// A stranger may stay this long even if others wait for its place.
constexpr std::chrono::milliseconds kMinStay{20};
// Without a free descriptor the hub retries after this time.
constexpr std::chrono::milliseconds kAcceptPause{250};
// A failed rendezvous stays this long to inform late ranks.
constexpr std::chrono::seconds kFarewell{1};

std::string join(const std::vector<int>& ranks) {
  constexpr std::size_t kShown = 64;
  std::string text;
  for (std::size_t i = 0; i < ranks.size() && i < kShown; ++i) {
    text += concat(i == 0 ? "" : ", ", ranks[i]);
  }
  return ranks.size() > kShown ? concat(text, ", … (", ranks.size(), " in all)") : text;
}

// Strangers may use a quarter of the descriptors that the ranks leave free. The rest is for the
// training's files.
std::size_t newcomer_limit(int world_size) {
  const std::size_t limit = descriptor_limit();
  const std::size_t taken = count_descriptors() + static_cast<std::size_t>(world_size);
  return std::clamp<std::size_t>(limit > taken ? (limit - taken) / 4 : 0, 1, kMaxNewcomers);
}

}  // namespace

ControlHub::ControlHub(RankState& state, Listener listener, std::string secret, uint64_t generation)
    : state_(state),
      listener_(std::move(listener)),
      secret_(std::move(secret)),
      generation_(generation),
      rendezvous_deadline_(Clock::now() + state.options.rendezvous_timeout),
      peers_(static_cast<std::size_t>(state.world_size)),
      max_newcomers_(newcomer_limit(state.world_size)) {
  peers_[0].host = state_.host;
  peers_[0].pid = static_cast<uint32_t>(getpid());
}

void ControlHub::wait_for_all(JobMonitor::Lock& lock) {
  // The background thread ends the wait: either all ranks joined or the rendezvous failed.
  state_.monitor.wait(lock, [this] { return complete_; });
  if (complete_ && !state_.monitor.failed()) {
    return;
  }
  if (state_.monitor.first_cause().exit_code ==
      ExitCode::Settings) {  // late ranks get the reason too
    state_.monitor.wait_despite_failure(lock, kFarewell, [this] {
      return num_joined() == state_.world_size && failure_was_delivered();
    });
  }
  state_.monitor.throw_if_failed();
}

void ControlHub::add_sockets(std::vector<pollfd>& watched) {
  const bool paused = state_.monitor.now() < accept_again_;
  watched.push_back({paused ? -1 : listener_.fd.get(), POLLIN, 0});  // poll ignores -1
  for (const auto& newcomer : newcomers_) {
    watched.push_back({newcomer.fd(), POLLIN, 0});
  }
  for (auto& peer : peers_) {
    if (peer.channel) {
      peer.watched_at = watched.size();
      const int events = POLLIN | (peer.channel->wants_to_write() ? POLLOUT : 0);
      watched.push_back({peer.channel->fd(), static_cast<short>(events), 0});
    }
  }
}

void ControlHub::serve(const std::vector<pollfd>& watched, SteadyTime now) {
  accept_newcomers(now);
  greet_newcomers(now);
  for (int rank = 1; rank < state_.world_size; ++rank) {
    const auto& peer = peers_[static_cast<std::size_t>(rank)];
    const auto ready = peer.watched_at == 0 ? 0 : watched[peer.watched_at].revents;
    if (peer.channel && ready != 0) {
      serve_peer(rank, (ready & ~POLLOUT) != 0, now);
    }
  }
  refused_.remove_if([now](Refused& refused) {
    return refused.channel.flush() != IoStatus::WouldBlock || now >= refused.deadline;
  });
  if (const auto steady = Clock::now(); steady >= next_heartbeat_) {
    next_heartbeat_ = steady + state_.options.heartbeat_interval;
    broadcast_frame(FrameType::Heartbeat, {});
  }
  check_limits(now);
  if (state_.monitor.is_over()) {
    state_.monitor.notify();
  }
}

void ControlHub::accept_newcomers(SteadyTime now) {
  if (now < accept_again_) {
    return;
  }
  for (int i = 0; i < 64; ++i) {
    const bool full = newcomers_.size() >= max_newcomers_;
    if (full && !may_make_room(now)) {
      return;
    }
    std::string why;
    UniqueFd fd = accept_tcp(listener_.fd.get(), why);
    if (!fd.valid() && why.empty()) {
      return;
    }
    if (!fd.valid() && !may_make_room(now)) {
      pause_accepting(now, why);
      return;
    }
    if (!fd.valid() || full) {
      newcomers_.pop_front();
    }
    if (fd.valid()) {
      newcomers_.emplace_back(std::move(fd), now + kHandshakeTimeout);
    }
  }
}

// Drops the oldest stranger if others wait, unless it had no time to authenticate. A dropped rank
// tries again.
bool ControlHub::may_make_room(SteadyTime now) const {
  return !newcomers_.empty() && now >= newcomers_.front().deadline() - kHandshakeTimeout + kMinStay;
}

// The listener stays readable in the pause: polling it would keep this thread busy.
void ControlHub::pause_accepting(SteadyTime now, const std::string& why) {
  if (accept_problem_.empty()) {
    log_warning("control plane: rank 0 cannot take a connection: " + why);
  }
  accept_problem_ = why;
  accept_again_ = newcomers_.empty() ? now + kAcceptPause : now;
}

void ControlHub::greet_newcomers(SteadyTime now) {
  for (auto newcomer = newcomers_.begin(); newcomer != newcomers_.end();) {
    const auto state = newcomer->advance(secret_);
    if (state == PendingPeer::State::Accepted) {
      admit(*newcomer, now);
    }
    const bool done = state != PendingPeer::State::Waiting || now >= newcomer->deadline();
    newcomer = done ? newcomers_.erase(newcomer) : std::next(newcomer);
  }
}

// Why a process that knows the secret cannot have its claimed rank; empty if it can.
std::string ControlHub::objection_to(const Hello& hello) const {
  const std::string who = concat(hello.host, ":", hello.pid);
  if (hello.world_size != static_cast<uint32_t>(state_.world_size)) {
    return concat("ranks disagree about the size of the job: rank ", hello.rank, " (", who,
                  ") has WORLD_SIZE ", hello.world_size, ", rank 0 (", state_.host, ":", getpid(),
                  ") has ", state_.world_size, "; start all ranks with the same number");
  }
  if (hello.rank >= hello.world_size) {
    return concat("rank ", hello.rank, " (", who, ") is not below WORLD_SIZE ", state_.world_size,
                  "; ranks run from 0 to ", state_.world_size - 1);
  }
  const auto& peer = peers_[hello.rank];
  if (hello.rank == 0 || peer.pid != 0) {
    return concat("two processes claim rank ", hello.rank, ": ", peer.host, ":", peer.pid, " and ",
                  who, "; give every process its own RANK, and every job its own port");
  }
  return {};
}

void ControlHub::admit(PendingPeer& newcomer, SteadyTime now) {
  const Hello hello = newcomer.hello();
  ControlChannel channel = newcomer.take_channel(secret_, hello.generation);
  if (hello.generation != generation_) {
    refuse(
        std::move(channel),
        concat("this process belongs to another job, or to another start of the job, than rank 0 "
               "(",
               state_.host, ":", getpid(),
               "), which listens at this port; give every job its own port (MASTER_PORT)"),
        now);
    return;
  }
  if (const auto objection = objection_to(hello); !objection.empty()) {
    refuse(std::move(channel), objection, now);
    if (!complete_ && !state_.monitor.failed()) {  // a running job ignores late joiners
      fail_job(ExitCode::Settings, objection);
    }
    return;
  }
  auto& peer = peers_[hello.rank];
  peer.channel.emplace(std::move(channel));
  peer.host = hello.host;
  peer.pid = hello.pid;
  peer.last_heard = now;
  accept_problem_.clear();
  peer.channel->queue(FrameType::Heartbeat, {});  // proves that it was accepted
  if (state_.monitor.failed()) {
    peer.channel->queue(FrameType::Failure, encode_cause(state_.monitor.first_cause()));
  } else if (num_joined() == state_.world_size) {
    complete_ = true;
    broadcast_frame(FrameType::Welcome, state_.host);
    state_.monitor.notify();
  }
  peer.channel->flush();
}

void ControlHub::refuse(ControlChannel channel, const std::string& message, SteadyTime now) {
  FailureCause cause;
  cause.message = message;
  cause.exit_code = ExitCode::Settings;
  channel.queue(FrameType::Failure, encode_cause(cause));
  if (channel.flush() == IoStatus::WouldBlock) {
    refused_.push_back({std::move(channel), now + kHandshakeTimeout});
  }
}

int ControlHub::num_joined() const {
  return static_cast<int>(
      std::count_if(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.pid != 0; }));
}

void ControlHub::serve_peer(int rank, bool readable, SteadyTime now) {
  auto& peer = peers_[static_cast<std::size_t>(rank)];
  std::vector<Frame> frames;
  const IoStatus status = readable ? peer.channel->receive(frames) : IoStatus::WouldBlock;
  if (!frames.empty()) {
    peer.last_heard = now;
  }
  for (const auto& frame : frames) {
    handle(rank, frame);
  }
  if (status == IoStatus::Closed) {
    lose(rank, peer.channel->problem().empty()
                   ? "its connection closed without a word (killed, crashed, or its host failed)"
                   : peer.channel->problem());
    return;
  }
  peer.channel->flush();  // reading reveals a broken connection
}

void ControlHub::handle(int rank, const Frame& frame) {
  auto& peer = peers_[static_cast<std::size_t>(rank)];
  if (frame.type == FrameType::Progress) {
    ByteReader reader(frame.payload);
    peer.progress.step = reader.signed_number();
    peer.progress.where = reader.text();
  } else if (frame.type == FrameType::Position) {
    RankPosition position;
    if (decode_position(frame.payload, position)) {
      note_position(rank, std::move(position));
    }
  } else if (frame.type == FrameType::Contribution) {
    Contribution contribution;
    if (decode_contribution(frame.payload, contribution)) {
      note_contribution(rank, std::move(contribution));
    }
  } else if (frame.type == FrameType::Note) {
    ByteReader reader(frame.payload);
    reader.number<uint32_t>();  // the sender is known from the connection
    auto text = reader.text();
    if (reader.finished() && text.size() <= NoteBoard::kMaxNoteBytes) {
      pass_on(rank, text);
      state_.notes.set(rank, std::move(text));
    }
  } else if (frame.type == FrameType::Exchange) {
    ExchangeValue value;
    if (decode_exchange(frame.payload, value)) {
      note_exchange(rank, std::move(value));
    }
  } else if (frame.type == FrameType::Failure) {
    FailureCause cause;
    if (decode_cause(frame.payload, cause) && !state_.monitor.failed()) {
      send_failure(cause);
    }
  }
}

void ControlHub::send_note(const std::string& text) {
  pass_on(0, text);
}

// Also sent back to its author, which is harmless.
void ControlHub::pass_on(int rank, const std::string& note) {
  ByteWriter writer;
  broadcast_frame(FrameType::Note, writer.number(static_cast<uint32_t>(rank)).text(note).take());
}

void ControlHub::broadcast_frame(FrameType type, const std::string& payload) {
  for (int rank = 1; rank < state_.world_size; ++rank) {
    send_to(rank, type, payload);
  }
}

void ControlHub::send_to(int rank, FrameType type, const std::string& payload) {
  auto& channel = peers_[static_cast<std::size_t>(rank)].channel;
  if (channel) {
    channel->queue(type, payload);
    ++state_.num_frames_sent;
    if (channel->flush() == IoStatus::WouldBlock) {
      state_.wake.notify();
    }
  }
}

// Reports a rank's own failure. A rank that waited for others knows only that it waited.
void ControlHub::send_failure(const FailureCause& cause) {
  const auto rank = static_cast<std::size_t>(cause.rank);
  if (cause.rank >= 0 && rank < peers_.size() && peers_[rank].position) {
    auto full = cause;
    if (const auto busy = tell_busy({cause.rank}); !busy.empty()) {
      full.message += "; meanwhile " + busy;
    }
    spread(full);
  } else {
    spread(cause);
  }
}

void ControlHub::spread(const FailureCause& cause) {
  if (state_.monitor.set_failure(cause, /*found_here=*/true)) {
    broadcast_frame(FrameType::Failure, encode_cause(cause));
  }
}

bool ControlHub::failure_was_delivered() const {
  return std::none_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
    return peer.channel && peer.channel->wants_to_write();
  });
}

void ControlHub::lose(int rank, const std::string& why) {
  auto& peer = peers_[static_cast<std::size_t>(rank)];
  peer.channel.reset();
  if (state_.monitor.is_over()) {
    return;
  }
  FailureCause cause;
  cause.rank = rank;
  cause.host = peer.host;
  cause.step = peer.progress.step;
  cause.where = peer.progress.where;
  cause.message = why;
  spread(cause);
}

void ControlHub::fail_job(ExitCode code, const std::string& message) {
  FailureCause cause;  // not caused by a single rank
  cause.message = message;
  cause.exit_code = code;
  spread(cause);
}

void ControlHub::check_limits(SteadyTime now) {
  if (state_.monitor.is_over()) {
    return;
  }
  judge();
  report_waits(now);
  for (int rank = 1; rank < state_.world_size; ++rank) {
    const auto& peer = peers_[static_cast<std::size_t>(rank)];
    if (peer.channel && now - peer.last_heard > state_.dead_after()) {
      lose(rank, concat("no sign of life for ", state_.dead_after().count(),
                        " ms (frozen, or its host or network is down)"));
      return;
    }
  }
  if (!complete_ && now >= rendezvous_deadline_) {
    std::vector<int> missing;
    for (int rank = 0; rank < state_.world_size; ++rank) {
      if (peers_[static_cast<std::size_t>(rank)].pid == 0) {
        missing.push_back(rank);
      }
    }
    fail_job(ExitCode::PeerLost,
             concat("rendezvous: ", num_joined(), " of ", state_.world_size, " ranks came within ",
                    state_.options.rendezvous_timeout.count(), " ms; missing: ", join(missing),
                    accept_problem_.empty() ? "" : "; rank 0 could not take their connections: ",
                    accept_problem_,
                    "; see what those ranks printed, or raise "
                    "context.control_plane.rendezvous_timeout_ms"));
    return;
  }
  for (const auto& [sequence, round] : rounds_) {
    if (now >= round.deadline) {
      std::vector<int> missing;
      for (int rank = 0; rank < state_.world_size; ++rank) {
        if (!round.values[static_cast<std::size_t>(rank)]) {
          missing.push_back(rank);
        }
      }
      fail_job(ExitCode::PeerLost,
               concat("control plane: ", to_string(round.kind), " waited ",
                      state_.options.collective_timeout.count(), " ms for rank ", join(missing)));
      return;
    }
  }
}

void ControlHub::wait_for_peers_to_leave(JobMonitor::Lock& lock) {
  // Closing first could cut off data that a peer has not read yet.
  state_.monitor.wait_despite_failure(lock, std::chrono::seconds(2), [this] {
    return std::none_of(peers_.begin(), peers_.end(),
                        [](const Peer& peer) { return peer.channel.has_value(); });
  });
}

}  // namespace ddp::detail
