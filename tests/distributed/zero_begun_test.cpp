// SPDX-License-Identifier: Apache-2.0
// ZeRO-1 whose steps begin before backward: steps that are left, skipped or looked into.
#include "ddp/optim/clip_grad_norm.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "distributed/zero_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

// As after an exception in backward that the caller caught. With one or two weights some ranks have
// no part of their own, and must not go on alone.
TEST_CASE("a sharded step that was begun and left is told on all ranks, once") {
  const bool tiny = GENERATE(false, true);
  const bool local_first = GENERATE(false, true);
  OptimizerOptions options = rule(OptimizerType::Sgd, true);
  options.groups.clear();
  options.overlap_backward = true;
  OptimizerOptions whole_options = rule(OptimizerType::Sgd, false);
  whole_options.groups.clear();
  torch::nn::Linear sharded_module(torch::nn::LinearOptions(tiny ? 1 : 33, 2).bias(false));
  torch::nn::Linear whole_module(torch::nn::LinearOptions(tiny ? 1 : 33, 2).bias(false));
  for (auto module : {sharded_module, whole_module}) {
    const torch::NoGradGuard no_grad;
    module->weight.copy_(integers(module->weight.sizes().vec(), 5).cpu());
    module->to(context().device());
  }
  DistributedDataParallel sharded(sharded_module, group());
  DistributedDataParallel whole(whole_module, group());
  auto optimizer = make_optimizer(sharded, options);
  auto expected = make_optimizer(whole, whole_options);
  const auto loss_of = [&](auto& model, int64_t step) {
    model.zero_grad();
    return model.forward(integers({2, tiny ? 1 : 33}, 8 * step + rank())).sum();
  };
  const auto train = [&](int64_t step) {
    auto loss = loss_of(sharded, step);
    optimizer.begin_step({.lr = 0.0625});
    loss.backward();
    optimizer.step(0.0625);
    loss_of(whole, step).backward();
    expected.step(0.0625);
    REQUIRE(torch::equal(sharded_module->weight, whole_module->weight));
  };
  train(0);
  train(1);
  auto left = loss_of(sharded, 2);
  optimizer.begin_step({.lr = 0.0625});
  left.backward();
  loss_of(whole, 2).backward();
  expected.step(0.0625);
  if (local_first) {  // as the first micro-batch of a step
    const auto guard = sharded.no_sync();
    sharded.forward(integers({2, tiny ? 1 : 33}, rank()));
    REQUIRE(torch::equal(sharded_module->weight, whole_module->weight));
  }
  auto loss = loss_of(sharded, 3);
  // Whoever reads weights finds those of all ranks.
  REQUIRE(torch::equal(sharded_module->weight, whole_module->weight));
  REQUIRE_THROWS_WITH(optimizer.begin_step({.lr = 0.0625}),
                      Catch::Contains("never ended") && Catch::Contains("1 of 1 buckets"));
  loss.backward();
  optimizer.step(0.0625);
  loss_of(whole, 3).backward();
  expected.step(0.0625);
  REQUIRE(torch::equal(sharded_module->weight, whole_module->weight));
  train(4);
  loss_of(sharded, 5);
  REQUIRE_THROWS_WITH(optimizer.begin_step({.lr = 0.0625, .clip_factor = 0.5}),
                      Catch::Contains("leave begin_step out"));
  REQUIRE_THROWS_WITH(optimizer.begin_step({}), Catch::Contains("needs a learning rate"));
}

TEST_CASE("first sharded steps that are skipped make no state") {
  OptimizerOptions options = rule(OptimizerType::AdamW, true);
  options.overlap_backward = true;
  Trainer sharded(options);
  Trainer whole(rule(OptimizerType::AdamW, false));
  for (int step = 0; step < 6; ++step) {
    CAPTURE(step);
    for (Trainer* trainer : {&sharded, &whole}) {
      trainer->model.zero_grad();
      auto loss = trainer->model.forward(batch(step));
      StepScalars scalars{.lr = 0.0625};
      if (step < 2) {  // the second is behind the rebuild of the buckets
        scalars.found_inf = 1.0;
      } else {
        trainer->optimizer.begin_step(scalars);
      }
      loss.backward();
      trainer->optimizer.step(scalars);
    }
    require_same_weights(sharded.module, whole.module);
  }
  require_same_state(sharded.optimizer.state_dict(), whole.optimizer.state_dict());
}

TEST_CASE("gradients that gave way to weights are refused, not measured") {
  OptimizerOptions options = rule(OptimizerType::Sgd, true);
  options.overlap_backward = true;
  Trainer sharded(options);
  Trainer whole(rule(OptimizerType::Sgd, false));
  for (int step = 0; step < 4; ++step) {
    CAPTURE(step);
    torch::Tensor norms[2];
    for (const int i : {0, 1}) {
      Trainer& trainer = i == 0 ? sharded : whole;
      trainer.model.zero_grad();
      auto loss = trainer.model.forward(batch(step));
      const bool begins = i == 0 && step != 2;
      if (begins) {
        trainer.optimizer.begin_step({.lr = 0.0625});
      }
      loss.backward();
      if (begins && step > 0) {
        const auto refused = Catch::Contains("leave begin_step out of steps whose gradients");
        REQUIRE_THROWS_WITH(clip_grad_norm_(trainer.model, 0.0), refused);
        REQUIRE_THROWS_WITH(trainer.optimizer.scan_gradients(), refused);
        REQUIRE_THROWS_WITH(trainer.optimizer.gradients(), refused);
      } else {
        norms[i] = clip_grad_norm_(trainer.model, 0.0);
      }
      trainer.optimizer.step(0.0625);
    }
    require_same_weights(sharded.module, whole.module);
    if (norms[0].defined()) {
      CHECK(norms[0].item<double>() == Approx(norms[1].item<double>()).epsilon(1e-6));
    }
  }
}

TEST_CASE("one rank alone may give a parameter other memory, all of them other values") {
  const auto dtype = GENERATE(torch::kFloat, torch::kBFloat16);
  OptimizerOptions options = rule(OptimizerType::AdamW, true);
  options.overlap_backward = GENERATE(false, true);
  Trainer sharded(options, {}, dtype);
  Trainer whole(rule(OptimizerType::AdamW, false), {}, dtype);
  for (int step = 0; step < 5; ++step) {
    CAPTURE(step);
    if (step == 2 && rank() == world() - 1) {
      for (auto& weight : sharded.module->weights) {
        weight.set_data(weight.detach().clone());
      }
    }
    for (Trainer* trainer : {&sharded, &whole}) {
      const torch::NoGradGuard no_grad;
      auto& weight = trainer->module->weights[1];
      if (step == 3) {  // other values on all ranks, then in the memory that it has
        weight.set_data(weight.detach() * 2);
      } else if (step == 4) {
        weight.set_data(weight.detach().as_strided(weight.sizes(), weight.strides()));
        weight.mul_(0.5);
      }
    }
    if (step >= 3) {  // what is saved between that and the next step follows, too
      require_same_state(sharded.optimizer.state_dict(), whole.optimizer.state_dict());
    }
    for (Trainer* trainer : {&sharded, &whole}) {
      trainer->model.zero_grad();
      auto loss = trainer->model.forward(batch(step));
      trainer->optimizer.begin_step({.lr = 0.0625});
      loss.backward();
      trainer->optimizer.step(0.0625);
    }
    require_same_weights(sharded.module, whole.module);
  }
  require_same_state(sharded.optimizer.state_dict(), whole.optimizer.state_dict());
  auto& weight = sharded.module->weights[2];
  const auto turned = weight.detach().t().contiguous().t();
  if (rank() == 0) {  // one rank's mistake keeps nobody from saving
    weight.set_data(turned);
  }
  require_same_state(sharded.optimizer.state_dict(), whole.optimizer.state_dict());
  weight.set_data(turned);
  REQUIRE_THROWS_WITH(sharded.optimizer.scan_gradients(),
                      Catch::Contains("parameter w2 was replaced"));
  if (options.overlap_backward) {
    REQUIRE_THROWS_WITH(sharded.optimizer.begin_step({.lr = 0.0625}),
                        Catch::Contains("parameter w2 was replaced"));
  }
}

TEST_CASE("state that is loaded beside other weights is what later steps work on") {
  OptimizerOptions options = rule(OptimizerType::AdamW, true);
  options.overlap_backward = GENERATE(false, true);
  Trainer sharded(options, {}, torch::kBFloat16);
  Trainer whole(rule(OptimizerType::AdamW, false), {}, torch::kBFloat16);
  for (Trainer* trainer : {&sharded, &whole}) {
    trainer->train(0);
    trainer->train(1);
    const StateDict saved = copy_of(trainer->optimizer.state_dict());
    trainer->train(2);
    for (auto& weight : trainer->module->weights) {
      weight.set_data(weight.detach() * 2);
    }
    trainer->optimizer.load_state_dict(saved);
    trainer->train(3);
  }
  require_same_weights(sharded.module, whole.module);
  require_same_state(sharded.optimizer.state_dict(), whole.optimizer.state_dict());
}

TEST_CASE("a sharded step that begins before the forward that lays buckets out anew is not lost") {
  OptimizerOptions options = rule(OptimizerType::Sgd, true);
  options.overlap_backward = true;
  Trainer sharded(options, with_cap(caps().back()));
  Trainer whole(rule(OptimizerType::Sgd, false), with_cap(caps().back()));
  for (int step = 0; step < 4; ++step) {
    CAPTURE(step);
    sharded.optimizer.begin_step({.lr = 0.0625});
    sharded.train(step);
    whole.train(step);
    require_same_weights(sharded.module, whole.module);
  }
  require_same_state(sharded.optimizer.state_dict(), whole.optimizer.state_dict());
}

// As a program does that catches an exception behind backward and goes back to its checkpoint.
TEST_CASE("state that is loaded ends a step that was begun") {
  OptimizerOptions options = rule(OptimizerType::AdamW, GENERATE(false, true));
  options.overlap_backward = true;
  const bool updated = GENERATE(false, true);
  CAPTURE(options.zero1, updated);
  Trainer begun(options, with_cap(caps().back()));
  Trainer plain(rule(OptimizerType::AdamW, false), with_cap(caps().back()));
  const auto begin = [&](int64_t step) {
    begun.model.zero_grad();
    auto loss = begun.model.forward(batch(step));
    begun.optimizer.begin_step({.lr = 0.0625});
    return loss;
  };
  StateDict model_state;
  StateDict state;
  for (int step = 0; step < 6; ++step) {
    CAPTURE(step);
    begin(step).backward();
    begun.optimizer.step(0.0625);
    plain.train(step);
    if (step == 2) {
      model_state = copy_of(begun.model.state_dict());
      state = copy_of(begun.optimizer.state_dict());
      auto left = begin(50);
      if (updated) {
        left.backward();
      }
      begun.model.load_state_dict(model_state);
      begun.optimizer.load_state_dict(state);
      if (!updated) {  // what began before is not gone on with
        const auto before = begun.module->weights[2].detach().clone();
        left.backward();
        CHECK(torch::equal(begun.module->weights[2].detach(), before));
      } else if (options.zero1) {  // where the gradients were lie weights
        begun.optimizer.step(0.0625);
      }
    }
    require_same_weights(begun.module, plain.module);
  }
  require_same_state(begun.optimizer.state_dict(), plain.optimizer.state_dict());
}
