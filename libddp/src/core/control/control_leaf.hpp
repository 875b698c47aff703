// SPDX-License-Identifier: Apache-2.0
// The link of ranks other than 0: one connection to rank 0.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/control/control_link.hpp"
#include "core/control/wire/control_channel.hpp"

namespace ddp::detail {

/// An authenticated connection and rank 0's first frames (at least one).
struct JoinedHub {
  ControlChannel channel;
  std::vector<Frame> frames;
};

/// Makes one attempt. Throws std::runtime_error with the reason on failure or at `deadline`.
JoinedHub join_hub(const std::string& host, int port, const std::string& secret, const Hello& hello,
                   SteadyTime deadline);

class ControlLeaf final : public ControlLink {
 public:
  ControlLeaf(RankState& state, JoinedHub hub);

  void wait_for_all(JobMonitor::Lock& lock) override;
  void contribute(Contribution contribution) override;
  void send_progress(const Progress& progress) override;
  void send_position(const RankPosition& position) override;
  void send_failure(const FailureCause& cause) override;
  void send_exchange(uint64_t key, uint32_t num_ranks, const std::string& value) override;
  void request_report() override { send(FrameType::ReportRequest, {}); }
  bool failure_was_delivered() const override { return state_.monitor.failed(); }
  void add_sockets(std::vector<pollfd>& watched) override;
  void serve(const std::vector<pollfd>& watched, SteadyTime now) override;
  void wait_for_peers_to_leave(JobMonitor::Lock& lock) override;

 private:
  /// Returns why rank 0 of this library would not send the frame; empty if it would.
  std::string handle(const Frame& frame);
  std::string record_result(ResultPart part);
  std::string record_exchange_result(ExchangeResult result);
  void send(FrameType type, const std::string& payload);
  void send_last_report();
  void declare_hub_lost(const std::string& why);

  RankState& state_;
  std::optional<ControlChannel> channel_;
  SteadyTime last_heard_;        // running clock
  SteadyTime next_heartbeat_{};  // steady clock: due at once after a suspension
  bool complete_ = false;
  bool leaving_ = false;
  std::optional<uint64_t> close_sequence_;
  std::map<uint64_t, uint32_t> expected_results_;    // number of values by sequence
  std::map<uint64_t, uint32_t> expected_exchanges_;  // number of values by key
};

}  // namespace ddp::detail
