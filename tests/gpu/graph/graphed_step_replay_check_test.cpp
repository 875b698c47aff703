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
  return {
      {.name = "plain", .optimizer = momentum, .ema = true},
      {.name = "fp16", .amp = fp16, .optimizer = momentum, .max_grad_norm = 0.5},
      {.name = "micro-batches, weighted",
       .optimizer = momentum,
       .micro_batches = 2,
       .weighted = true},
      {.name = "gradients that are zeroed outside", .optimizer = momentum, .zeroes_outside = true},
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

TEST_CASE("a captured step with two synchronised backwards raises no alarm") {
  const auto train = [](int64_t every) {
    Mlp first{7}, second{8};
    DistributedDataParallel first_model(first, group());
    DistributedDataParallel second_model(second, group());
    auto first_optimizer = make_optimizer(first_model, {.momentum = 0.5});
    auto second_optimizer = make_optimizer(second_model, {.momentum = 0.5});
    GraphedStep step(
        context(),
        {.models = {&first_model, &second_model},
         .optimizers = {first_optimizer.get(), second_optimizer.get()}},
        [&](const at::Tensor& batch, const StepScalars& scalars) {
          first_model.zero_grad();
          second_model.zero_grad();
          const auto loss = first_model.forward(batch).sum();
          loss.backward();
          first_optimizer->step(scalars);
          second_model.forward(batch).sum().backward();
          second_optimizer->step(scalars);
          return loss.detach();
        },
        GraphedStepOptions{.mode = CudaGraph::Auto, .replay_check_every = every});
    for (int64_t i = 0; i < 20; ++i) {
      step(batch_of(rank(), i, 4), {.lr = 1.0 / 1024, .step = i});
    }
    CHECK(step.counts().replayed > 10);
    std::vector<at::Tensor> all;
    for (const auto& module : {first, second}) {
      for (const auto& parameter : module->parameters()) {
        all.push_back(parameter.detach().clone());
      }
    }
    return all;
  };
  require_equal(train(1), train(0));
}
