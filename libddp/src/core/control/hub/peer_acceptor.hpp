// SPDX-License-Identifier: Apache-2.0
// Rank 0's listener: accepts connections and authenticates them. Unauthenticated connections
// ("strangers") can neither stay for long nor use up the file descriptors.
#pragma once

#include <poll.h>

#include <functional>
#include <list>
#include <string>
#include <vector>

#include "core/control/wire/control_channel.hpp"
#include "core/control/wire/tcp_socket.hpp"

namespace ddp::detail {

/// All times are of the running clock. Only the background thread uses it.
class PeerAcceptor {
 public:
  /// Receives each authenticated connection.
  using Admit = std::function<void(const Hello&, ControlChannel)>;

  /// `listener` is already bound. At most `max_newcomers` connections are unauthenticated at once.
  PeerAcceptor(Listener listener, std::string secret, std::size_t max_newcomers);

  void add_sockets(std::vector<pollfd>& watched, SteadyTime now) const;
  void serve(SteadyTime now, const Admit& admit);
  /// Sends `message` as a settings error and closes the connection.
  void refuse(ControlChannel channel, const std::string& message, SteadyTime now);
  /// Sends the rest of the messages of refuse().
  void flush_refused(SteadyTime now);
  /// Why accepting a connection failed after the last clear_problem(); empty if none failed.
  const std::string& problem() const { return problem_; }
  void clear_problem() { problem_.clear(); }

 private:
  struct Refused {
    ControlChannel channel;
    SteadyTime deadline;
  };

  void accept_newcomers(SteadyTime now);
  bool may_make_room(SteadyTime now) const;
  void pause(SteadyTime now, const std::string& why);

  Listener listener_;
  const std::string secret_;
  const std::size_t max_newcomers_;
  std::list<PendingPeer> newcomers_;
  SteadyTime accept_again_{};
  std::string problem_;
  std::list<Refused> refused_;
};

/// Number of connections that may be unauthenticated at once: a quarter of the descriptors that
/// the ranks leave free. The rest is for the training's files.
std::size_t newcomer_limit(int world_size);

}  // namespace ddp::detail
