// SPDX-License-Identifier: Apache-2.0
// Captures calls of one GraphedStep on this rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "ddp/train/graphed_step.hpp"
#include "train/graph/step_cache.hpp"
#include "train/graph/step_feed.hpp"
#include "train/graph/step_ring.hpp"

namespace ddp::detail {

/// What captures use. All of it outlives the graphs.
struct CaptureParts {
  Context& context;
  const GraphedParts& parts;
  const StepFeed& feed;
  const StepRing& ring;
  GraphPool* pool;  ///< null if nothing is captured
};

/// Captures a call, which executes nothing on the device. Returns null with a `reason` if the
/// capture failed, and undoes the host's side of it. `step_bytes` is the peak memory of an eager
/// step; 0: not known. Throws if a rank is lost. The graph of a rehearsal leaves the host's state
/// as it was, and its replays do too.
std::unique_ptr<StepGraph> capture_step(const CaptureParts& use, StepCall& call, uint64_t sequence,
                                        int64_t step_bytes, std::string* reason);

}  // namespace ddp::detail
