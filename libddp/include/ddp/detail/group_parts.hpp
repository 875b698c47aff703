// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

namespace ddp {

class Communicator;
class ControlPlane;
class LaunchSequencer;

namespace detail {

class BackendMeasurements;
class CapturableCommunicator;
class GroupChoices;

/// What the library's parts keep with a communicator.
class GroupParts {
 public:
  /// Choices measured on this group or adopted from a checkpoint or file.
  GroupChoices& choices();
  /// The agreed order in which several models launch their buckets, shared with groups made by
  /// split(). Groups that share ranks must launch in the same order.
  LaunchSequencer& launch_sequencer();
  /// The control plane of this group's ranks. Agreements made over it are independent of the
  /// collectives a rank has called. Null for groups made by split() and without a Context.
  std::shared_ptr<ControlPlane> control_plane() const { return control_plane_.lock(); }
  void set_control_plane(const std::shared_ptr<ControlPlane>& plane) { control_plane_ = plane; }
  /// What a CUDA graph needs to capture this group's collectives; null if none can capture them.
  virtual CapturableCommunicator* capturable() { return nullptr; }
  /// What the backend measures itself; null: nothing.
  virtual BackendMeasurements* measurements() { return nullptr; }

 protected:
  GroupParts(Communicator& group, const GroupParts* parent);
  ~GroupParts();

 private:
  const std::unique_ptr<GroupChoices> choices_;
  const std::shared_ptr<LaunchSequencer> launch_sequencer_;
  std::weak_ptr<ControlPlane> control_plane_;
};

}  // namespace detail
}  // namespace ddp
