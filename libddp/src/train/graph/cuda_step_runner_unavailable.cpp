// SPDX-License-Identifier: Apache-2.0
// Stands in for cuda_step_runner.cpp in builds without CUDA.
#include "ddp/core/error.hpp"
#include "train/graph/step_runner.hpp"

namespace ddp::detail {

std::unique_ptr<StepRunner> make_cuda_step_runner(Context&, GraphedParts, GraphedStepOptions,
                                                  std::shared_ptr<GraphPool>) {
  throw InternalError("built without CUDA");
}

}  // namespace ddp::detail
