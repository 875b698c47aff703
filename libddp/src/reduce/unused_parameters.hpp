// SPDX-License-Identifier: Apache-2.0
// Tracks which parameters got a gradient on this rank and on any rank. A parameter that no rank
// used keeps its .grad. A parameter that only other ranks used gets the mean with zeros of this
// rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ddp/comm/communicator.hpp"
#include "ddp/reduce/options.hpp"

namespace ddp::detail {

class UnusedParameters {
 public:
  UnusedParameters(CommunicatorPtr communicator, const DdpOptions& options, size_t num_parameters);

  /// Call for every gradient, including those under no_sync().
  void mark_used(int parameter) { used_[static_cast<size_t>(parameter)] = true; }
  void forget_used();
  void forget_used(int parameter) { used_[static_cast<size_t>(parameter)] = false; }

  /// Whether the next synchronised backward reads on the host which parameters other ranks used.
  bool reads_map() const;
  /// Collective if reads_map().
  void start_map();
  void abandon_map() { work_ = nullptr; }
  /// Returns per parameter whether any rank used it after the last synchronised backward. Without a
  /// map all ranks use the same parameters.
  std::vector<bool> finish_map();
  /// Call when a synchronised backward ended.
  void end_pass(bool is_first);

  /// The number of parameters without a gradient on this rank in the last synchronised backward.
  int64_t num_unused() const;
  /// Whether the set of unused parameters differed between two backwards.
  bool set_changed() const { return history_.set_changed; }

  /// Per parameter: whether it got a gradient since the last synchronised backward.
  const std::vector<bool>& used() const { return used_; }
  void set_used(const std::vector<bool>& used) { used_ = used; }
  /// What synchronised backwards found.
  struct History {
    std::vector<bool> used_by_any;      // static_graph: by the first backward
    std::vector<bool> previous_unused;  // by the last one
    bool set_changed = false;
  };
  const History& history() const { return history_; }
  void set_history(const History& history) { history_ = history; }

 private:
  CommunicatorPtr communicator_;
  bool finds_unused_;
  bool is_static_;
  std::vector<bool> used_;
  History history_;
  at::Tensor map_;  // int32 [num_parameters]
  WorkPtr work_;
};

}  // namespace ddp::detail
