// SPDX-License-Identifier: Apache-2.0
#include "core/control/hub/peer_table.hpp"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "ddp/core/error.hpp"

namespace ddp::detail {

PeerTable::PeerTable(RankState& state)
    : state_(state), peers_(static_cast<std::size_t>(state.membership.world_size)) {
  at(0).host = state.host;
  at(0).pid = static_cast<uint32_t>(getpid());
}

std::string PeerTable::why_refused(const Hello& hello) const {
  const std::string who = concat(hello.host, ":", hello.pid);
  if (hello.world_size != static_cast<uint32_t>(size())) {
    return concat("ranks disagree about the size of the job: rank ", hello.rank, " (", who,
                  ") has WORLD_SIZE ", hello.world_size, ", rank 0 (", state_.host, ":", getpid(),
                  ") has ", size(), "; fix: start all ranks with the same number");
  }
  if (hello.rank >= hello.world_size) {
    return concat("rank ", hello.rank, " (", who, ") is not below WORLD_SIZE ", size(),
                  "; ranks count from 0 to ", size() - 1);
  }
  if (hello.pid == 0) {  // stands for a rank that has not joined
    return concat("rank ", hello.rank, " (", who, ") has no process id");
  }
  const auto& peer = peers_[hello.rank];
  if (hello.rank == 0 || peer.pid != 0) {
    return concat("two processes claim rank ", hello.rank, ": ", peer.host, ":", peer.pid, " and ",
                  who, "; fix: give every process its own RANK, and every job its own port");
  }
  return {};
}

void PeerTable::add(const Hello& hello, ControlChannel channel, SteadyTime now) {
  auto& peer = peers_.at(hello.rank);
  peer.channel.emplace(std::move(channel));
  peer.host = hello.host;
  peer.pid = hello.pid;
  peer.last_heard = now;
}

std::vector<int> PeerTable::missing() const {
  std::vector<int> missing;
  for (int rank = 0; rank < size(); ++rank) {
    if (at(rank).pid == 0) {
      missing.push_back(rank);
    }
  }
  return missing;
}

int PeerTable::num_joined() const {
  return static_cast<int>(
      std::count_if(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.pid != 0; }));
}

void PeerTable::send(int rank, FrameType type, std::string_view payload) {
  auto& channel = at(rank).channel;
  if (channel) {
    channel->queue(type, payload);
    ++state_.num_frames_sent;
    if (channel->flush() == IoStatus::WouldBlock) {
      state_.wake.notify();
    }
  }
}

void PeerTable::broadcast(FrameType type, std::string_view payload) {
  for (int rank = 1; rank < size(); ++rank) {
    send(rank, type, payload);
  }
}

bool PeerTable::has_unsent() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
    return peer.channel && peer.channel->wants_to_write();
  });
}

void PeerTable::add_sockets(std::vector<pollfd>& watched) {
  for (auto& peer : peers_) {
    if (peer.channel) {
      peer.watched_at = watched.size();
      const int events = POLLIN | (peer.channel->wants_to_write() ? POLLOUT : 0);
      watched.push_back({peer.channel->fd(), static_cast<short>(events), 0});
    }
  }
}

short PeerTable::events(int rank, const std::vector<pollfd>& watched) const {
  const auto& peer = at(rank);
  return peer.channel && peer.watched_at != 0 ? watched[peer.watched_at].revents : short{0};
}

IoStatus PeerTable::receive(int rank, SteadyTime now, std::vector<Frame>& frames) {
  auto& peer = at(rank);
  const IoStatus status = peer.channel->receive(frames);
  if (!frames.empty()) {
    peer.last_heard = now;
  }
  return status;
}

std::string PeerTable::why_closed(int rank) const {
  return at(rank).channel->why_closed();
}

// A broken connection is found by the next read.
void PeerTable::flush(int rank) {
  at(rank).channel->flush();
}

void PeerTable::disconnect(int rank) {
  at(rank).channel.reset();
}

bool PeerTable::any_connected() const {
  return std::any_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.channel.has_value(); });
}

std::optional<int> PeerTable::find_silent(SteadyTime now, std::chrono::milliseconds limit) const {
  for (int rank = 1; rank < size(); ++rank) {
    const auto& peer = at(rank);
    if (peer.channel && now - peer.last_heard > limit) {
      return rank;
    }
  }
  return std::nullopt;
}

std::optional<int> PeerTable::find_deaf(std::size_t limit) const {
  for (int rank = 1; rank < size(); ++rank) {
    if (at(rank).channel && at(rank).channel->num_unsent_bytes() > limit) {
      return rank;
    }
  }
  return std::nullopt;
}

std::chrono::milliseconds PeerTable::silence(int rank, SteadyTime now) const {
  return rank == 0
             ? std::chrono::milliseconds(0)
             : std::chrono::duration_cast<std::chrono::milliseconds>(now - at(rank).last_heard);
}

void PeerTable::set_progress(int rank, Progress progress) {
  at(rank).progress = std::move(progress);
}

Progress PeerTable::progress(int rank) const {
  return rank == 0 ? state_.progress.get() : at(rank).progress;
}

std::vector<std::string> PeerTable::hosts() const {
  std::vector<std::string> hosts;
  for (const auto& peer : peers_) {
    hosts.push_back(peer.host);
  }
  return hosts;
}

std::string PeerTable::name(int rank) const {
  return concat("rank ", rank, " (", host(rank), ")");
}

std::string list_ranks(const std::vector<int>& ranks) {
  constexpr std::size_t kShown = 64;
  std::string text;
  for (std::size_t i = 0; i < ranks.size() && i < kShown; ++i) {
    text += concat(i == 0 ? "" : ", ", ranks[i]);
  }
  return ranks.size() > kShown ? concat(text, ", … (", ranks.size(), " in all)") : text;
}

}  // namespace ddp::detail
