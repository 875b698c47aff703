// SPDX-License-Identifier: Apache-2.0
// The state of a data-parallel model in a checkpoint.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "ddp/core/state_dict.hpp"
#include "ddp/reduce/model_tensors.hpp"

namespace ddp::detail {

/// All parameters and buffers of a model, including those of ddp.parameters_to_ignore: a file
/// without them would be of another model. Ranks may have different values of ignored tensors, so
/// each rank saves its own in addition to rank 0's. Not thread-safe; no collectives.
class ModelState {
 public:
  /// Frozen parameters are those that do not require a gradient now, at the construction.
  ModelState(ModelTensors tensors, std::vector<std::string> ignored, bool has_peers);

  const ModelTensors& tensors() const { return tensors_; }

  /// From now on the state has only a fingerprint of the frozen parameters.
  void leave_frozen_out() { holds_frozen_ = false; }
  /// Reads all frozen parameters. The host waits.
  std::string compute_frozen_fingerprint() const;
  /// Returns the fingerprint of the first call, save or load.
  const std::string& frozen_fingerprint() const;

  StateDict save() const;
  /// Checks the whole `state` before it writes a tensor. Throws MismatchError.
  void load(const StateDict& state);

 private:
  NamedParameters saved_tensors() const;
  bool is_ignored(const std::string& name) const;
  bool is_frozen(const NamedParameter& entry) const { return frozen_.contains(entry.name); }
  void require_same_frozen(const StateDict& state) const;

  ModelTensors tensors_;
  std::vector<std::string> ignored_;
  std::set<std::string> frozen_;
  bool has_peers_;
  bool holds_frozen_ = true;
  mutable std::string frozen_fingerprint_;  // empty: not read yet
};

}  // namespace ddp::detail
