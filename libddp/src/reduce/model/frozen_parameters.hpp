// SPDX-License-Identifier: Apache-2.0
// Freezing between steps: which parameters of a wrapped model have requires_grad set. All ranks
// freeze the same parameters for the same forwards.
#pragma once

#include <set>
#include <string>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/state_dict.hpp"

namespace ddp::detail {

class FrozenParameters {
 public:
  /// `parameters` are all of the model. Those that do not require a gradient now have no place in a
  /// bucket and stay frozen.
  FrozenParameters(NamedParameters parameters, CommunicatorPtr communicator, bool is_static);

  /// Call before each synchronised forward. Collective if a parameter was frozen or unfrozen since
  /// the last call; with `compares_once` only if the model never had the same frozen parameters
  /// before, because another rank may replay a graph that was captured with them. Throws
  /// - MismatchError on all ranks naming the first parameter that is frozen on some ranks only. If
  ///   some ranks changed nothing, the control plane reports the deadlock and names a parameter;
  /// - SettingsError for a change with static_graph or inside a join, and for a parameter that was
  ///   frozen at construction and now requires a gradient.
  void update(bool in_join, const std::string& of_model = "", bool compares_once = false);
  /// Whether every parameter was frozen at the last update(): the forward's backward reduces
  /// nothing.
  bool covers_all() const { return covers_all_; }

 private:
  void refuse(const std::string& name, char flag, bool in_join) const;
  void compare(size_t parameter, const std::string& flags, const std::string& of_model) const;

  const NamedParameters parameters_;
  const CommunicatorPtr communicator_;
  const bool is_static_;
  std::string flags_;  // by parameter at the last update(): kTrained, kFrozen or kAlwaysFrozen
  std::set<std::string> compared_;  // all flags so far
  bool covers_all_ = false;
};

}  // namespace ddp::detail
