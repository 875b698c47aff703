// SPDX-License-Identifier: Apache-2.0
// The link of rank 0, the center of the star.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/control/control_link.hpp"
#include "core/control/hub/collective_rounds.hpp"
#include "core/control/hub/exchange_rounds.hpp"
#include "core/control/hub/peer_acceptor.hpp"
#include "core/control/hub/peer_table.hpp"
#include "core/control/hub/report_collector.hpp"
#include "core/control/hub/wait_monitor.hpp"

namespace ddp::detail {

class ControlHub final : public ControlLink {
 public:
  /// `listener` is already bound.
  ControlHub(RankState& state, Listener listener, std::string secret, uint64_t generation);

  void wait_for_all(JobMonitor::Lock& lock) override;
  void contribute(Contribution contribution) override;
  void send_progress(const Progress&) override {}
  void send_position(const RankPosition& position) override;
  void send_failure(const FailureCause& cause) override;
  void send_exchange(uint64_t key, uint32_t num_ranks, const std::string& value) override;
  void request_report() override;
  std::optional<JobReport> take_report() override;
  bool failure_was_delivered() const override { return !peers_.has_unsent(); }
  void add_sockets(std::vector<pollfd>& watched) override;
  void serve(const std::vector<pollfd>& watched, SteadyTime now) override;
  void wait_for_peers_to_leave(JobMonitor::Lock& lock) override;

 private:
  void admit(const Hello& hello, ControlChannel channel, SteadyTime now);
  void serve_peer(int rank, bool readable, SteadyTime now);
  /// Returns why no rank of this library would send the frame; empty if one would.
  std::string handle(int rank, const Frame& frame);
  void record_contribution(int rank, Contribution contribution);
  void send_result(CollectiveRounds::Result result);
  void record_exchange(int rank, ExchangeValue value);
  std::string record_failure(const FailureCause& cause);

  void begin_report();
  JobReport make_report(SteadyTime now);

  void fail(const FailureCause& cause);
  void fail_job(ExitCode code, const std::string& message);
  void declare_lost(int rank, const std::string& why);
  void check_limits(SteadyTime now);

  RankState& state_;
  const uint64_t generation_;
  const SteadyTime rendezvous_deadline_;
  bool complete_ = false;  // every rank has joined
  PeerTable peers_;
  PeerAcceptor acceptor_;
  CollectiveRounds rounds_;
  WaitMonitor waits_;
  ExchangeRounds exchanges_;
  ReportCollector reports_;
  std::optional<JobReport> ready_report_;
  bool was_stopped_ = false;     // this process, so long that the others ended
  SteadyTime next_heartbeat_{};  // steady clock: due at once after a suspension
};

}  // namespace ddp::detail
