// SPDX-License-Identifier: Apache-2.0
// Metrics, checkpoints and stop checks in the two forms of join.
#include "ddp/comm/functional.hpp"
#include "ddp/reduce/join.hpp"
#include "ddp/train/checkpoint.hpp"
#include "ddp/train/metrics.hpp"
#include "ddp/train/stop_poll.hpp"
#include "distributed/ddp_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

MetricsOptions log_each(int64_t steps) {
  MetricsOptions options;
  options.log_every = steps;
  options.dir = "";
  return options;
}

// A loop of one step, whose end is `call`. On one rank nothing is collective.
void require_refused(const std::string& activity, const std::function<void()>& call) {
  Mlp module;
  DistributedDataParallel model(module, group());
  const auto run = [&] {
    join(model, [&] {
      loss_of(model, 0).backward();
      call();
    });
  };
  if (context().world_size() == 1) {
    run();
    return;
  }
  REQUIRE_THROWS_AS(run(), SettingsError);
  REQUIRE_THROWS_WITH(run(), Catch::Contains("must make, here " + activity + ": ranks that ran") &&
                                 Catch::Contains("use join(model, step, has_batch)"));
}

}  // namespace

TEST_CASE("calls of all ranks are refused in a loop that ranks leave at different steps") {
  Metrics metrics(context(), log_each(1));
  require_refused("metrics", [&] { metrics.end_step(0, {.num_samples = 1}); });
  require_refused("metrics", [&] { metrics.end_epoch(0); });
  Metrics metrics_of_later_steps(context(), log_each(50));
  require_refused("metrics", [&] { metrics_of_later_steps.end_step(0, {.num_samples = 1}); });
  Checkpointer checkpointer(context(), {}, {});
  require_refused("checkpoint check", [&] { checkpointer.save_if_due(0); });
  require_refused("evaluation", [&] { StopPoll(context(), 0, "evaluation").should_stop(); });
  require_refused("all_gather_with_grad",
                  [&] { all_gather_with_grad(torch::ones({1}, context().device()), group()); });
  context().control_plane().barrier();
  metrics.end_step(1, {.num_samples = 1});  // after the join all is as before
  checkpointer.save_if_due(1);
}

TEST_CASE("metrics log in a loop whose ranks end together or throw") {
  Mlp module;
  DistributedDataParallel model(module, group());
  Metrics metrics(context(), log_each(1));
  const auto run = [&](int num_batches) {
    join(model,
         [&] {
           for (int64_t step = 0; step < num_batches; ++step) {
             loss_of(model, step).backward();
             metrics.end_step(step, {.num_samples = 1});
           }
         },
         {.throw_on_early_termination = true});
  };
  run(2);
  if (context().world_size() > 1) {
    REQUIRE_THROWS_AS(run(1 + rank()), MismatchError);
  }
}

TEST_CASE("steps of ranks without a batch log nothing, and all ranks log the same steps") {
  Mlp module;
  DistributedDataParallel model(module, group());
  Metrics metrics(context(), log_each(1));
  Checkpointer checkpointer(context(), {}, {});
  const int num_batches = 1 + 2 * rank();  // rank r has losses r + 1 of r + 1 samples
  int64_t step = 0;
  int taken = 0;
  join(
      model,
      [&](bool has_batch) {
        REQUIRE(has_batch == (taken++ < num_batches));
        model.zero_grad();
        const int64_t count = has_batch ? rank() + 1 : 0;
        const auto outputs = model.forward(batch_of(rank(), 0, 4).slice(0, 0, count));
        model.weighted_backward(outputs.sum(), static_cast<double>(count));
        metrics.end_step(step, {.loss = double(rank() + 1), .num_samples = count});
        checkpointer.save_if_due(step++);
      },
      [&] { return taken < num_batches; });
  REQUIRE(step == 1 + 2 * (context().world_size() - 1));
  double loss = 0, samples = 0;
  for (int r = 0; r < context().world_size(); ++r) {
    samples += (1 + 2 * r) * (r + 1);
    loss += (1 + 2 * r) * (r + 1) * (r + 1);
  }
  REQUIRE(metrics.end_epoch(0).train_loss == loss / samples);
}
