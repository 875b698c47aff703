// SPDX-License-Identifier: Apache-2.0
// The control plane of ranks other than 0: one connection to rank 0.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/control_plane_base.hpp"

namespace ddp::detail {

/// An authenticated connection and rank 0's first frames (at least one).
struct JoinedHub {
  ControlChannel channel;
  std::vector<Frame> frames;
};

/// One attempt. Throws std::runtime_error with the reason on failure or at `deadline`.
JoinedHub join_hub(const std::string& host, int port, const std::string& secret, const Hello& hello,
                   SteadyTime deadline);

class ControlLeaf final : public ControlPlaneBase {
 public:
  ControlLeaf(const LaunchEnvironment& launch, const ControlPlaneOptions& options, JoinedHub hub);
  ~ControlLeaf() override;

  /// Returns when every rank has joined. Throws rank 0's failure or PeerLostError.
  void wait_for_all();

 private:
  void contribute(Contribution contribution) override;
  void send_progress(const Progress& progress) override;
  void send_position(const RankPosition& position) override;
  void send_failure(const FailureCause& cause) override;
  void send_note(const std::string& text) override;
  void send_exchange(uint64_t key, uint32_t num_ranks, const std::string& value) override;
  void handle_exchanged(const Frame& frame);
  bool failure_was_delivered() const override { return failure_.failed(); }
  void add_sockets(std::vector<pollfd>& watched) override;
  void serve(const std::vector<pollfd>& watched, SteadyTime now) override;
  void wait_for_peers_to_leave(std::unique_lock<std::mutex>& lock) override;

  void handle(const Frame& frame);
  void send(FrameType type, const std::string& payload);
  void lose_hub(const std::string& why);

  std::optional<ControlChannel> channel_;
  SteadyTime last_heard_;        // running clock
  SteadyTime next_heartbeat_{};  // steady clock: due at once after a suspension
  bool complete_ = false;
  bool leaving_ = false;
  std::string hub_host_;
  std::optional<uint64_t> close_sequence_;
};

}  // namespace ddp::detail
