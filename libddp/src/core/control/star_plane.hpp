// SPDX-License-Identifier: Apache-2.0
// The callers' side of a control plane of several ranks: a star around rank 0.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/control/control_link.hpp"
#include "core/control/plane_interfaces.hpp"
#include "core/control/plane_service.hpp"
#include "core/control/rank_position.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

class StarPlane final : public ControlPlane,
                        public GroupExchange,
                        public PositionBoard,
                        public BackgroundService {
 public:
  using MakeLink = std::function<std::unique_ptr<ControlLink>(RankState&)>;

  /// Starts the background thread. wait_for_all() ends the rendezvous.
  StarPlane(const Membership& membership, const ControlPlaneOptions& options,
            const MakeLink& make_link);
  /// Destroying a plane that was never closed is a failure for its peers.
  ~StarPlane() override;

  /// Returns when every rank has joined. Throws PeerLostError naming the missing ranks, or rank
  /// 0's failure.
  void wait_for_all();
  /// The number of frames written to sockets so far.
  uint64_t num_frames_sent() const { return state_.num_frames_sent; }

  const Membership& membership() const override { return state_.membership; }
  std::string broadcast(const std::string& value, int root) override;
  std::vector<std::string> all_gather(const std::string& value) override;
  std::vector<std::string> gather(const std::string& value, int root) override;
  void barrier() override;
  void set_progress(int64_t step, const std::string& where) override;
  void publish_failure(const FailureCause& cause) override;
  bool failed() const override { return state_.monitor.failed(); }
  FailureCause failure() const override { return state_.monitor.first_cause(); }
  int add_failure_callback(std::function<void(const FailureCause&)> callback) override;
  void remove_failure_callback(int token) override;
  void close() override;
  GroupExchange* group_exchange() override { return this; }
  PositionBoard* position_board() override { return this; }
  BackgroundService* background_service() override { return this; }
  std::map<int, std::string> exchange(uint64_t key, int num_ranks, const std::string& value,
                                      const std::function<void()>& poll) override;
  void add_probe(Probe probe) override;
  std::string set_activity(std::string activity) override;
  void stop() override;
  void outlive_context() override;

 private:
  std::vector<std::string> collective(CollectiveKind kind, uint32_t root, const std::string& value);

  RankState state_;
  const std::unique_ptr<ControlLink> link_;
  PlaneService service_;
  EventLoop loop_;
  bool closed_ = false;
  bool left_ = false;  // after a failure
};

}  // namespace ddp::detail
