// SPDX-License-Identifier: Apache-2.0
#include "comm/launch_sequencer.hpp"

#include <algorithm>
#include <utility>

#include "comm/first_problem.hpp"
#include "ddp/detail/check.hpp"

namespace ddp {

LaunchSequencer::ModelId LaunchSequencer::register_model() {
  const std::lock_guard lock(mutex_);
  return next_model_++;
}

void LaunchSequencer::begin_pass(ModelId model, int num_buckets, std::function<void(int)> launch,
                                 std::function<void()> finish) {
  const std::lock_guard lock(mutex_);
  std::erase_if(passes_, [model](const Pass& pass) { return pass.model == model; });
  passes_.insert(passes_.begin(), Pass{.model = model,
                                       .ready = std::vector<bool>(static_cast<size_t>(num_buckets)),
                                       .launch = std::move(launch),
                                       .finish = std::move(finish)});
}

void LaunchSequencer::launch_in_order(Pass& pass) {
  while (!pass.done() && pass.ready[static_cast<size_t>(pass.num_launched)]) {
    // Counted before the call: a later flush must not retry a launch that threw.
    pass.launch(pass.num_launched++);
  }
}

void LaunchSequencer::bucket_ready(ModelId model, int bucket) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(passes_.begin(), passes_.end(),
                                  [model](const Pass& pass) { return pass.model == model; });
  DDP_CHECK(found != passes_.end(), "bucket ", bucket, " is ready outside a pass");
  DDP_CHECK(!found->ready[static_cast<size_t>(bucket)], "bucket ", bucket, " is ready twice");
  found->ready[static_cast<size_t>(bucket)] = true;
  ++found->num_ready;
  for (Pass& pass : passes_) {
    launch_in_order(pass);
    if (!pass.done()) {
      break;  // later passes wait for this one
    }
  }
}

void LaunchSequencer::flush() {
  std::vector<std::function<void()>> finishes;
  {
    const std::lock_guard lock(mutex_);
    for (Pass& pass : passes_) {
      if (pass.complete()) {
        launch_in_order(pass);
        finishes.push_back(std::move(pass.finish));
      }
    }
    std::erase_if(passes_, [](const Pass& pass) { return pass.complete(); });
  }
  detail::FirstProblem problem;
  for (const auto& finish : finishes) {
    problem.attempt(finish);
  }
  problem.rethrow();
}

void LaunchSequencer::end_pass(ModelId model) {
  const std::lock_guard lock(mutex_);
  std::erase_if(passes_, [model](const Pass& pass) { return pass.model == model; });
}

}  // namespace ddp
