// SPDX-License-Identifier: Apache-2.0
// Checks before the first step that a run does what its settings mean.
#pragma once

#include <cstdint>
#include <string>

#include "ddp/core/control_plane.hpp"
#include "ddp/data/dataset.hpp"
#include "ddp/train/checkpoint.hpp"

namespace examples {

/// Throws SettingsError on all ranks if their numbers of batches per epoch differ: ranks with more
/// batches would wait for the others in the middle of a step. Collective.
void require_equal_batches(int64_t batches_per_epoch, ddp::ControlPlane& control_plane);

/// Throws DataError if both splits have class names and the names differ: the test figures would be
/// meaningless.
void require_same_classes(const ddp::Dataset& train, const ddp::Dataset& test);

/// Length of an epoch, which gives step numbers their meaning: epochs, learning rates and the end
/// of the run follow from it.
struct EpochLength {
  int64_t steps = 0;             ///< optimizer steps per epoch
  int64_t samples_per_step = 0;  ///< over all ranks
  std::string to_string() const;
};

/// Call it after `restore`. Throws SettingsError if the checkpoint comes from a run with another
/// epoch length. Records the length for later checkpoints.
void require_same_epochs(ddp::Checkpointer& checkpointer, const EpochLength& length);

}  // namespace examples
