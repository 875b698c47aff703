// SPDX-License-Identifier: Apache-2.0
// The link of rank 0: the center of the star.
#pragma once

#include <list>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/control_channel.hpp"
#include "core/control_link.hpp"

namespace ddp::detail {

class ControlHub final : public ControlLink {
 public:
  /// `listener` is already bound.
  ControlHub(RankState& state, Listener listener, std::string secret, uint64_t generation);

  void wait_for_all(JobMonitor::Lock& lock) override;

 private:
  struct Peer {
    std::optional<ControlChannel> channel;
    std::string host;
    uint32_t pid = 0;
    std::size_t watched_at = 0;  ///< index of its socket in poll()'s list; 0: not in it yet
    SteadyTime last_heard{};     ///< by the running clock
    Progress progress;
    uint64_t num_calls = 0;                ///< collectives of the control plane
    std::optional<RankPosition> position;  ///< set while it waits
    SteadyTime waits_since{};
    bool wait_is_reported = false;
  };
  struct Round {
    CollectiveKind kind = CollectiveKind::Barrier;
    uint32_t root = 0;
    std::string activity;
    int first_rank = 0;
    SteadyTime deadline{};
    std::vector<std::optional<std::string>> values;
    int num_arrived = 0;
  };
  struct Refused {
    ControlChannel channel;
    SteadyTime deadline;
  };

  void contribute(Contribution contribution) override;
  void send_progress(const Progress&) override {}
  void send_position(const RankPosition& position) override { note_position(0, position); }
  void send_failure(const FailureCause& cause) override;
  void send_note(const std::string& text) override;
  void send_exchange(uint64_t key, uint32_t num_ranks, const std::string& value) override;
  bool failure_was_delivered() const override;
  void add_sockets(std::vector<pollfd>& watched) override;
  void serve(const std::vector<pollfd>& watched, SteadyTime now) override;
  void wait_for_peers_to_leave(JobMonitor::Lock& lock) override;

  void accept_newcomers(SteadyTime now);
  bool may_make_room(SteadyTime now) const;
  void pause_accepting(SteadyTime now, const std::string& why);
  void greet_newcomers(SteadyTime now);
  void admit(PendingPeer& newcomer, SteadyTime now);
  void refuse(ControlChannel channel, const std::string& message, SteadyTime now);
  std::string objection_to(const Hello& hello) const;
  void serve_peer(int rank, bool readable, SteadyTime now);
  void handle(int rank, const Frame& frame);

  // Collectives and deadlock detection (control_hub_rounds.cpp)
  void note_contribution(int rank, Contribution contribution);
  void fail_round(int rank, const Contribution& contribution, const Round& round);
  void finish_round(uint64_t sequence, Round& round);
  void note_exchange(int rank, ExchangeValue value);
  void note_position(int rank, RankPosition position);
  void judge();
  void report_waits(SteadyTime now);
  /// Positions of the ranks that do not wait: "rank 1 is at step 3 in save".
  std::string tell_busy(const std::vector<int>& but) const;
  Progress progress_of(int rank) const;
  std::string name_of(int rank) const;

  void spread(const FailureCause& cause);
  void lose(int rank, const std::string& why);
  void check_limits(SteadyTime now);
  void fail_job(ExitCode code, const std::string& message);
  void pass_on(int rank, const std::string& note);
  void broadcast_frame(FrameType type, const std::string& payload);
  void send_to(int rank, FrameType type, const std::string& payload);
  int num_joined() const;

  RankState& state_;
  Listener listener_;
  const std::string secret_;
  const uint64_t generation_;
  const SteadyTime rendezvous_deadline_;
  bool complete_ = false;
  std::vector<Peer> peers_;  // indexed by rank; rank 0 is this process and has no channel
  std::list<PendingPeer> newcomers_;
  const std::size_t max_newcomers_;
  SteadyTime accept_again_{};
  std::string accept_problem_;  // why accepting a connection failed since a rank joined
  std::list<Refused> refused_;
  std::map<uint64_t, Round> rounds_;
  std::map<uint64_t, std::map<int, std::string>> exchanges_;  // incomplete; by key, then rank
  bool positions_are_new_ = false;
  SteadyTime next_heartbeat_{};  // steady clock: due at once after a suspension
};

}  // namespace ddp::detail
