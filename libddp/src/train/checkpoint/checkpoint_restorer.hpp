// SPDX-License-Identifier: Apache-2.0
// Chooses the checkpoint that a run continues from, and loads it. All ranks choose the same one.
#pragma once

#include <optional>
#include <vector>

#include "core/launch/launch_environment.hpp"
#include "ddp/train/checkpoint.hpp"
#include "train/checkpoint/checkpoint_files.hpp"
#include "train/checkpoint/checkpoint_texts.hpp"
#include "train/checkpoint/save_history.hpp"

namespace ddp::detail {

/// The parts of a Checkpointer that a restore reads from and loads into.
struct RestoreParts {
  ControlPlane& control_plane;
  const at::Device device;
  const CheckpointOptions& options;
  const LaunchEnvironment launch;
  CheckpointDir& dir;
  CheckpointTexts& texts;
  const std::vector<StatefulRef>& objects;
};

/// Checkpointer::restore() without the report to the Context: the step of the loaded checkpoint, or
/// nothing if the run starts at step 0. Collective.
std::optional<SavedStep> restore_checkpoint(const RestoreParts& parts);

}  // namespace ddp::detail
