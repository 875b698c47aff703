// SPDX-License-Identifier: Apache-2.0
// train.non_finite on several ranks, in eager and in captured steps, with whole and sharded
// optimizers.
#include "ddp/train/non_finite.hpp"

#include <limits>

#include "ddp/optim/make_optimizer.hpp"
#include "ddp/train/graphed_step.hpp"
#include "distributed/ddp_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// A model and a step. The step adds `offset` to its loss and multiplies the loss by `factor`.
struct GuardedRun {
  GuardedRun(NonFinite action, OptimizerImplementation implementation, bool zero1)
      : model(module, group()),
        optimizer(make_optimizer(model,
                                 [&] {
                                   OptimizerOptions options;
                                   options.momentum = 0.5;
                                   options.implementation = implementation;
                                   options.zero1 = zero1;
                                   return options;
                                 }())),
        guard(context(), action, *optimizer, scaler),
        step(context(), {.models = {&model}, .optimizers = {optimizer.get()}, .scaler = &scaler},
             [this](const std::vector<torch::Tensor>& batch, const StepScalars& scalars) {
               model.zero_grad();
               const auto loss = model.forward(batch[0]).sum() * batch[1] + batch[2];
               scaler.scale(guard.watch(loss)).backward();
               const auto found = scaler.clip_and_step(*optimizer, scalars, 0.0, guard.skips());
               scaler.update();
               return std::vector{loss, found.first_non_finite};
             }) {}

  StepLog run(int64_t i, float factor, float offset) {
    const auto log = step({batch_of(rank(), i, 4), torch::full({}, factor, on_device()),
                           torch::full({}, offset, on_device())},
                          {.lr = 1.0 / 64, .step = i})
                         .log;
    guard.end_step(i, {.loss = log[0], .first_non_finite = log[1]});
    return log;
  }
  std::vector<torch::Tensor> weights() const {
    std::vector<torch::Tensor> values;
    for (const auto& parameter : module->parameters()) {
      values.push_back(parameter.detach().clone());
    }
    return values;
  }

  Mlp module;
  DistributedDataParallel<Mlp> model;
  std::unique_ptr<Optimizer> optimizer;
  GradScaler scaler;
  NonFiniteGuard guard;
  GraphedStep<std::vector<torch::Tensor>, std::vector<torch::Tensor>> step;
};

bool last_rank() {
  return rank() == world() - 1;
}

}  // namespace

TEST_CASE("a step that is not finite on one rank is dropped on all in that step") {
  const bool zero1 = GENERATE(false, true);
  const auto implementation =
      GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  if (zero1 && implementation == OptimizerImplementation::List) {
    return;  // ZeRO's shards are always flat
  }
  GuardedRun run(NonFinite::Skip, implementation, zero1);
  for (int64_t i = 0; i < 10; ++i) {
    CAPTURE(i, zero1);
    // Adding inf to the loss keeps the gradients finite; multiplying by inf does not.
    const bool bad_loss = i == 3 || i == 7;
    const bool bad_gradient = i == 8;
    const bool bad = bad_loss || bad_gradient;
    const auto before = run.weights();
    const auto log = run.run(i, bad_gradient && last_rank() ? kInf : 1.0F,
                             bad_loss && last_rank() ? kInf : 0.0F);
    CHECK(std::isfinite(log[0]) == !(bad && last_rank()));
    CHECK((log[1] >= 0) == bad);
    const auto after = run.weights();
    if (bad) {
      require_equal(after, before);
    } else {
      CHECK_FALSE(torch::equal(after.back(), before.back()));
    }
    for (const auto& weight : after) {
      auto lowest = weight.clone();
      auto highest = weight.clone();
      group()->all_reduce(lowest, ReduceOp::Min)->wait();
      group()->all_reduce(highest, ReduceOp::Max)->wait();
      REQUIRE(torch::equal(lowest, highest));
    }
    CHECK(run.guard.before_save() ==
          (i == 8 ? "the last 2 updates were skipped (train.non_finite=skip)" : ""));
  }
  if (context().device().is_cuda()) {
    CHECK(run.step.counts().replayed >= 3);  // the skipped steps are replays too
  }
}

TEST_CASE("a run that is not finite ends on all ranks with step, parameter and rank") {
  GuardedRun run(NonFinite::Error, OptimizerImplementation::Flat, GENERATE(false, true));
  for (int64_t i = 0; i < 4; ++i) {
    run.run(i, 1.0F, 0.0F);
    run.guard.check_steps();
  }
  std::string message;
  try {
    run.run(4, last_rank() ? kInf : 1.0F, 0.0F);
    run.guard.check_steps();
  } catch (const NonFiniteError& error) {
    CHECK(error.exit_code() == ExitCode::Mismatch);
    message = error.what();
  }
  CHECK_THAT(message,
             Catch::Contains("step 5 is not finite (train.non_finite=error)") &&
                 Catch::Contains("the first gradient with inf or NaN is that of first.weight") &&
                 Catch::Contains("the loss of rank " + std::to_string(world() - 1) + " is "));
}

TEST_CASE("a loss that is not finite ends the run of its own rank") {
  GuardedRun run(NonFinite::Error, OptimizerImplementation::Flat, false);
  std::string message;
  try {
    run.run(0, 1.0F, last_rank() ? -kInf : 0.0F);
    run.guard.check_steps();
  } catch (const NonFiniteError& error) {
    message = error.what();
  }
  CHECK(message.empty() == !last_rank());
  if (last_rank()) {
    CHECK_THAT(message, Catch::Contains("step 1 is not finite") &&
                            Catch::Contains("the loss of rank " + std::to_string(rank()) +
                                            " is -inf; all weights are finite"));
  }
}
