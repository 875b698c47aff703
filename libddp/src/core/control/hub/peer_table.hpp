// SPDX-License-Identifier: Apache-2.0
// Rank 0's view of the job's ranks: their processes, connections, last signs of life and progress.
#pragma once

#include <poll.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/control/control_link.hpp"
#include "core/control/wire/control_channel.hpp"

namespace ddp::detail {

/// The mutex of the state's monitor guards it.
class PeerTable {
 public:
  explicit PeerTable(RankState& state);

  /// Why a process that knows the secret cannot have the rank that it claims; empty if it can.
  std::string why_refused(const Hello& hello) const;
  void add(const Hello& hello, ControlChannel channel, SteadyTime now);
  std::vector<int> missing() const;
  int num_joined() const;
  bool all_joined() const { return num_joined() == state_.membership.world_size; }

  void send(int rank, FrameType type, std::string_view payload);
  void broadcast(FrameType type, std::string_view payload);
  bool has_unsent() const;

  void add_sockets(std::vector<pollfd>& watched);
  /// Returns poll()'s events of the rank's socket, 0 without a connection.
  short events(int rank, const std::vector<pollfd>& watched) const;
  /// Returns Closed if the connection is gone; why_closed() then has the reason.
  IoStatus receive(int rank, SteadyTime now, std::vector<Frame>& frames);
  std::string why_closed(int rank) const;
  void flush(int rank);
  void disconnect(int rank);
  bool any_connected() const;
  /// Returns a connected rank that sent nothing for longer than `limit`.
  std::optional<int> find_silent(SteadyTime now, std::chrono::milliseconds limit) const;

  /// Returns a connected rank to which more than `limit` bytes could not be sent.
  std::optional<int> find_deaf(std::size_t limit) const;

  void set_progress(int rank, Progress progress);
  Progress progress(int rank) const;
  const std::string& host(int rank) const { return at(rank).host; }
  uint32_t process(int rank) const { return at(rank).pid; }  ///< 0: not joined
  bool is_connected(int rank) const { return rank == 0 || at(rank).channel.has_value(); }
  /// Time since the rank's last message.
  std::chrono::milliseconds silence(int rank, SteadyTime now) const;
  std::vector<std::string> hosts() const;  ///< by rank
  /// "rank 1 (node3)"
  std::string name(int rank) const;
  int size() const { return state_.membership.world_size; }

 private:
  struct Peer {
    std::optional<ControlChannel> channel;
    std::string host;
    uint32_t pid = 0;
    std::size_t watched_at = 0;  ///< index of its socket in poll()'s list; 0: not in it yet
    SteadyTime last_heard{};     ///< by the running clock
    Progress progress;
  };

  Peer& at(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  const Peer& at(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }

  RankState& state_;
  std::vector<Peer> peers_;  // indexed by rank; rank 0 is this process and has no channel
};

/// "1, 4, 5", at most 64 of them.
std::string list_ranks(const std::vector<int>& ranks);

}  // namespace ddp::detail
