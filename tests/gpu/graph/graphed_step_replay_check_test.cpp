// SPDX-License-Identifier: Apache-2.0
// train.replay_check_every with captured steps: checked steps replay two further graphs.
#include "gpu/graph/graphed_step_test.hpp"
#include "support/message_of.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

std::vector<Setup> rehearsed_setups() {
  AmpOptions fp16;
  fp16.dtype = AmpDtype::Fp16;
  fp16.growth_interval = 5;
  const OptimizerOptions momentum{.momentum = 0.9};
  return {{.name = "plain", .optimizer = momentum, .ema = true},
          {.name = "fp16", .amp = fp16, .optimizer = momentum, .max_grad_norm = 0.5},
          {.name = "micro-batches, weighted",
           .optimizer = momentum,
           .micro_batches = 2,
           .weighted = true},
          {.name = "partial batches", .optimizer = momentum, .partial_every = 4}};
}

}  // namespace

TEST_CASE("captured and eager steps that are rehearsed have the bits of others") {
  for (auto setup : rehearsed_setups()) {
    CAPTURE(setup.name);
    const auto expected = train(setup, CudaGraph::Auto, 40);
    for (const int64_t every : {1, 7}) {
      for (const auto mode : {CudaGraph::Auto, CudaGraph::Off}) {
        CAPTURE(every, mode);
        setup.replay_check_every = every;
        const auto checked = train(setup, mode, 40);
        require_equal(checked.tensors, expected.tensors);
        CHECK(checked.log == expected.log);
        CHECK(checked.loss_scale == expected.loss_scale);
        CHECK((checked.counts.replayed > 20) == (mode == CudaGraph::Auto));
        CHECK(checked.counts.why_eager.empty());
      }
    }
  }
}

TEST_CASE("a gradient that one of the two runs of a captured step changes is found") {
  const auto on_gpu = at::TensorOptions(at::kLong).device(context().device());
  const auto num_runs = torch::zeros({}, on_gpu);  // no buffer, so rehearsals count
  const auto spoiled_run = torch::full({}, -1, on_gpu);
  Setup setup{.name = "spoiled", .optimizer = {.momentum = 0.9}};
  setup.replay_check_every = 4;
  setup.before_backward = [&](const at::Tensor& loss) {
    loss.register_hook([&](const at::Tensor& gradient) {
      num_runs.add_(1);
      return gradient * (1.0 + num_runs.eq(spoiled_run) / 1024.0);
    });
  };
  Trainer trainer(setup, CudaGraph::Auto);
  int64_t i = 0;
  for (; i < 23; ++i) {
    trainer.step(trainer.batches(i), i);
  }
  REQUIRE(trainer.counts().replayed > 15);
  if (rank() == world() - 1) {
    spoiled_run.copy_(num_runs + 2);  // the step after the rehearsal of step 24
  }
  const auto message =
      ::testing::message_of<MismatchError>([&] { trainer.step(trainer.batches(i), i); });
  INFO(message);
  CHECK((message.find(concat("rank ", rank(), " (")) == 0) == (rank() == world() - 1));
  CHECK(message.empty() == (rank() != world() - 1));
}
