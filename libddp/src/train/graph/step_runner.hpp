// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "ddp/train/graphed_step.hpp"

namespace ddp::detail {

/// Runs the calls of one GraphedStep.
class StepRunner {
 public:
  virtual ~StepRunner() = default;
  virtual StepDone run(StepCall& call) = 0;
  virtual void drop_graphs() = 0;
  virtual GraphedStepCounts counts() const = 0;
  virtual const std::shared_ptr<GraphPool>& pool() const = 0;
  /// Call before the communicators close: graphs hold the communicators' memory and plans.
  virtual void end() = 0;
};

/// For a CUDA device, in builds with CUDA.
std::unique_ptr<StepRunner> make_cuda_step_runner(Context& context, GraphedParts parts,
                                                  GraphedStepOptions options,
                                                  std::shared_ptr<GraphPool> pool);

}  // namespace ddp::detail
