// SPDX-License-Identifier: Apache-2.0
// Compares what all ranks must have equal, by hashes (ddp.desync_check_every). A bit that changed
// on one rank alone is never repaired by training: the ranks go on with different weights.
//
//   every K-th Optimizer::step     hash parameters, optimizer state, averages; one number for all
//                                  all_gather of that number; the host waits
//   if the numbers differ          all_gather of the hash of each tensor; name the first difference
//
// Optimizer::require_means() calls it. Around a GraphedStep on CUDA its runner does, because a
// replay runs no host code. Both do it before the update, when no kernel writes weights.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/state_dict.hpp"
#include "ddp/reduce/options.hpp"

namespace ddp::detail {

/// A tensor whose values differ between ranks.
struct ReplicaDifference {
  size_t tensor = 0;                     ///< its index
  std::vector<std::vector<int>> groups;  ///< ranks with equal values, the largest group first

  /// Whether more than half of the ranks agree.
  bool has_majority(int world_size) const;
};

/// From `hashes` [ranks][tensors]; in the order of the tensors.
std::vector<ReplicaDifference> find_differences(const std::vector<std::vector<int64_t>>& hashes);

/// "momentum_buffer of fc.weight differs on rank 2 from the other 3 ranks".
std::string describe_difference(const std::string& what, const ReplicaDifference& difference,
                                const Membership& membership);

/// What an optimizer keeps, and the parameters that it updates.
struct OptimizerState {
  StateDict state;
  NamedParameters parameters;
};

class ReplicaCheck {
 public:
  /// `weights` are all parameters that ranks have in common; `of_model` is for messages. Throws
  /// SettingsError for a negative number of steps, and for repair with two ranks, of which none is
  /// a majority.
  ReplicaCheck(NamedParameters weights, CommunicatorPtr communicator, const DdpOptions& options,
               std::string of_model);

  /// Whether the `num_steps`-th step of an optimizer is checked.
  bool is_due(int64_t num_steps) const { return num_steps % options_.desync_check_every == 0; }
  /// Compares the weights, the tensors that `states` returns and those of all sources. State of
  /// parameters that are not among the weights is left out. Collective, and the host waits. A
  /// difference is an error (MismatchError on all ranks), a warning, or repaired.
  using States = std::function<std::vector<OptimizerState>()>;
  void run(const States& states, int64_t num_steps);

  /// Further tensors that ranks have in common, as long as the result lives. Those that only some
  /// ranks have are not compared.
  using Source = std::function<NamedParameters()>;
  [[nodiscard]] std::shared_ptr<const Source> add_source(Source source);

  /// While it lives, optimizers of this thread neither check nor count their steps.
  class Hold {
   public:
    Hold();
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
  };
  static bool is_held();

 private:
  NamedParameters weights_and_state(const States& states) const;
  NamedParameters tensors(const States& states) const;
  at::Tensor hash(const NamedParameters& tensors) const;
  bool are_equal(const at::Tensor& hashes) const;
  void check_names(const NamedParameters& compared);
  void keep_common(NamedParameters& tensors) const;
  bool repair(const NamedParameters& compared, const States& states,
              const std::vector<ReplicaDifference>& all) const;
  bool resolve(const NamedParameters& compared, const States& states,
               const std::vector<ReplicaDifference>& all, const std::string& message) const;

  const NamedParameters weights_;
  const CommunicatorPtr communicator_;
  const DdpOptions options_;
  const std::string of_model_;
  std::vector<std::weak_ptr<const Source>> sources_;
  int64_t last_equal_step_ = 0;  // 0: none
  bool has_warned_of_names_ = false;
};

/// nullptr if nothing is to be compared: the check is off, or there is one rank.
std::shared_ptr<ReplicaCheck> make_replica_check(NamedParameters weights,
                                                 CommunicatorPtr communicator,
                                                 const DdpOptions& options, std::string of_model);

}  // namespace ddp::detail
