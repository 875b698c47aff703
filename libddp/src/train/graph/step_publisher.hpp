// SPDX-License-Identifier: Apache-2.0
// The device's side of a StepRing.
#pragma once

#include <vector>

#include "train/graph/step_feed.hpp"
#include "train/graph/step_ring.hpp"

namespace ddp::detail {

/// Slots in mapped host memory, which has one address for host and device.
StepRing::Slots make_mapped_slots(at::Device device);

/// Enqueues the kernel that writes `scalars` into the slot of the step that `feed` was fed with.
/// Capturable. Throws SettingsError for scalars on other devices and for types that are not logged.
void publish(const std::vector<at::Tensor>& scalars, const StepFeed& feed, const StepRing& ring);

}  // namespace ddp::detail
