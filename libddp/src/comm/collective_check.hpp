// SPDX-License-Identifier: Apache-2.0
// Implements context.communicator.check_collectives: ranks compare each call over the control plane
// before making it. Calls that differ are an error, not a wrong sum or a hang.
//
// The host waits for the slowest rank at each collective. The rank's position shows this wait, so a
// rank that can make no further call is reported (deadlock.hpp). The check uses no device,
// so it works inside GroupScopes. Point-to-point messages and CUDA graphs are not compared, because
// replays make no calls; so GraphedStep captures nothing meanwhile.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/exchange.hpp"
#include "core/control/plane_interfaces.hpp"
#include "core/control/rank_position.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// "all_reduce (sum of 1000 Float)", "broadcast (1000 Float, root 0)", "barrier".
std::string describe_call(const char* operation, const at::Tensor& tensor = {},
                          std::optional<ReduceOp> op = {}, std::optional<int> root = {});

/// Checks the calls of one communicator.
class CollectiveCheck {
 public:
  /// Makes the check of the world. Null if `control_plane` has one rank or the setting is off.
  /// Collective: the setting must be equal on all ranks.
  static std::shared_ptr<CollectiveCheck> create(const std::shared_ptr<ControlPlane>& control_plane,
                                                 bool wanted, const AddProbe& add_probe);

  CollectiveCheck(std::weak_ptr<GroupExchange> exchange, int num_ranks, std::string group,
                  AddProbe add_probe = {});
  ~CollectiveCheck();
  CollectiveCheck(const CollectiveCheck&) = delete;
  CollectiveCheck& operator=(const CollectiveCheck&) = delete;

  /// Throws MismatchError naming both sides, on all ranks of the group, if `call` differs on any.
  /// Throws PeerLostError if a rank makes no call within `limit`. Calls `poll` while waiting;
  /// `poll` ends the wait by throwing. Returns the number of the call. Any thread.
  /// With `sizes` also compares what each rank sends with what the other expects. A message has
  /// room for the sizes of the first 10 ranks or more.
  int64_t compare(const std::string& call, std::chrono::milliseconds limit,
                  const std::function<void()>& poll,
                  const std::optional<ExchangeSizes>& sizes = std::nullopt);

  /// Makes the check of a group that the split with call number `split` made.
  std::shared_ptr<CollectiveCheck> of_group(int64_t split, int color, int num_ranks) const;

 private:
  class Calls;

  const std::weak_ptr<GroupExchange> exchange_;  // groups may outlive their control plane
  const int num_ranks_;
  const std::string group_;  // "the world", "the world, split #3, color 1"
  const AddProbe add_probe_;
  const std::unique_ptr<Calls> calls_;
  const std::shared_ptr<PositionSource> position_source_;
};

}  // namespace ddp::detail
