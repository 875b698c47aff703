// SPDX-License-Identifier: Apache-2.0
// What must hold before the first step, so that a run is not silently another one.
#pragma once

#include <cstdint>
#include <string>

#include "ddp/core/control_plane.hpp"
#include "ddp/data/dataset.hpp"
#include "ddp/train/checkpoint.hpp"

namespace examples {

/// Throws SettingsError on all ranks where they have different numbers of batches an epoch: those
/// with more would wait for the others in the middle of a step. Collective.
void require_equal_batches(int64_t batches_per_epoch, ddp::ControlPlane& control_plane);

/// Throws DataError where both splits know the names of their classes and these differ: the test
/// would compare numbers that mean different things.
void require_same_classes(const ddp::Dataset& train, const ddp::Dataset& test);

/// The length of an epoch, which decides what a step number means: epochs, learning rates and the
/// end of the run follow from it.
struct EpochLength {
  int64_t steps = 0;             ///< optimizer steps an epoch
  int64_t samples_per_step = 0;  ///< of all ranks
  std::string to_string() const;
};

/// Call after `restore`. Throws SettingsError where the checkpoint was saved by a run with another
/// epoch length; notes the length for those saved from here on.
void require_same_epochs(ddp::Checkpointer& checkpointer, const EpochLength& length);

}  // namespace examples
