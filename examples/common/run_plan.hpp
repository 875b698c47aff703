// SPDX-License-Identifier: Apache-2.0
// Values that the examples derive from their settings before a run.
#pragma once

#include <cstdint>

#include "common/run_checks.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/train/config.hpp"

namespace examples {

struct RunPlan {
  int64_t num_steps = 0;  ///< optimizer steps of the whole run
  EpochLength epoch;
};

/// Plans a run whose ranks have `batches_per_epoch` batches each; compares this number between
/// ranks (collective). Fills in the run's description for metrics, and the length of the learning
/// rate schedule if unset.
RunPlan plan_run(ddp::Config& cfg, const ddp::Context& ctx, int64_t batches_per_epoch);

/// Options of a loader for an evaluation set: all samples, batches of train.eval_batch_size.
ddp::LoaderOptions eval_loader_options(const ddp::Config& cfg);

}  // namespace examples
