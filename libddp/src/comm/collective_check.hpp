// SPDX-License-Identifier: Apache-2.0
// context.communicator.check_collectives: what the ranks of a group call is compared before each
// call, over the control plane, so that a mistake has a name and not a wrong sum or a hang.
//
// The host waits for the slowest rank at each collective. The position of the rank shows this wait,
// so that a rank that can make no further call is reported (control_verdict.hpp). Nothing of it
// touches a device, so it works inside GroupScopes. Not compared are point-to-point messages, and
// what a CUDA graph captures: a capture that only some ranks try would wait for the others, who are
// not to call anything. GraphedStep compares captured calls afterwards.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/group_exchange.hpp"
#include "core/rank_position.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// "all_reduce (sum of 1000 Float)", "broadcast (1000 Float, root 0)", "barrier".
std::string describe_call(const char* operation, const at::Tensor& tensor = {},
                          std::optional<ReduceOp> op = {}, std::optional<int> root = {});

/// Of one communicator.
class CollectiveCheck {
 public:
  /// Of all ranks; null where `control_plane` has but one, or the setting is off. Collective: all
  /// ranks must have set the same.
  static std::shared_ptr<CollectiveCheck> create(const std::shared_ptr<ControlPlane>& control_plane,
                                                 bool wanted, const WatchPosition& watch);

  CollectiveCheck(std::weak_ptr<GroupExchange> exchange, int num_ranks, std::string group,
                  WatchPosition watch = {});

  /// Throws MismatchError naming both sides, on all ranks of the group, where `call` differs on
  /// any; PeerLostError where a rank makes no call within `limit`. `look` is called meanwhile, and
  /// ends the wait by throwing. Returns the number of the call. Any thread.
  int64_t compare(const std::string& call, std::chrono::milliseconds limit,
                  const std::function<void()>& look);

  /// Of a group that was split off in call number `split`.
  std::shared_ptr<CollectiveCheck> of_group(int64_t split, int color, int num_ranks) const;

 private:
  class Calls;

  const std::weak_ptr<GroupExchange> exchange_;  // groups may outlive their control plane
  const int num_ranks_;
  const std::string group_;  // "the world", "the world, split #3, color 1"
  const WatchPosition watch_;
  const std::shared_ptr<Calls> calls_;  // shared with the probe of the position
};

}  // namespace ddp::detail
