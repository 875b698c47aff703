// SPDX-License-Identifier: Apache-2.0
// Buckets updated while backward goes on: the weights of a step that waits for all of them, bit for
// bit, whatever the buckets.
#include "ddp/optim/make_optimizer.hpp"
#include "distributed/ddp_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

OptimizerOptions rule(OptimizerType type, bool overlap_backward) {
  OptimizerOptions options;
  options.type = type;
  options.momentum = 0.9;
  options.weight_decay = 0.01;
  options.implementation = OptimizerImplementation::Flat;
  options.overlap_backward = overlap_backward;
  return options;
}

void require_same_weights(const Mlp& a, const Mlp& b) {
  const auto left = a->parameters();
  const auto right = b->parameters();
  for (size_t i = 0; i < left.size(); ++i) {
    INFO("parameter " << i);
    REQUIRE(torch::equal(left[i].detach(), right[i].detach()));
  }
}

void require_same_state(const AnyOptimizer& a, const AnyOptimizer& b) {
  const StateDict left = a.state_dict();
  const StateDict right = b.state_dict();
  REQUIRE(left.tensors.size() == right.tensors.size());
  for (const auto& [key, tensor] : left.tensors) {
    INFO(key);
    REQUIRE(torch::equal(tensor, right.tensors.at(key)));
  }
}

// Counts how many of the parameters begin_step's buckets have changed when backward ends.
int num_changed(const Mlp& module, const std::vector<torch::Tensor>& before) {
  int changed = 0;
  const auto parameters = module->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    changed += torch::equal(parameters[i].detach(), before[i]) ? 0 : 1;
  }
  return changed;
}

}  // namespace

TEST_CASE("an overlapped step gives the weights of a step at the end") {
  const auto type = GENERATE(OptimizerType::Sgd, OptimizerType::AdamW, OptimizerType::Lars);
  for (const double cap : bucket_caps()) {
    CAPTURE(cap);
    Mlp overlapped;
    Mlp plain;
    DistributedDataParallel model(overlapped, group(), with_cap(cap));
    DistributedDataParallel reference(plain, group(), with_cap(cap));
    auto optimizer = make_optimizer(model, rule(type, true));
    auto expected = make_optimizer(reference, rule(type, false));
    for (int step = 0; step < 6; ++step) {
      CAPTURE(step);
      model.zero_grad();
      reference.zero_grad();
      {  // a micro-step before
        const auto local = model.no_sync();
        const auto also_local = reference.no_sync();
        model.forward(batch_of(rank(), 50 + step, 4)).sum().backward();
        reference.forward(batch_of(rank(), 50 + step, 4)).sum().backward();
      }
      auto loss = model.forward(batch_of(rank(), step, 4)).sum();
      optimizer.begin_step({.lr = 0.015625});
      loss.backward();
      optimizer.step(0.015625);
      reference.forward(batch_of(rank(), step, 4)).sum().backward();
      expected.step(0.015625);
      require_same_weights(overlapped, plain);
      require_equal(grads_of(*overlapped), grads_of(*plain));
    }
    require_same_state(optimizer, expected);
  }
}

TEST_CASE("buckets are updated before step, but for steps that did not begin") {
  Mlp module;
  DistributedDataParallel model(module, group(), with_cap(bucket_caps().back()));
  auto optimizer = make_optimizer(model, rule(OptimizerType::Sgd, true));
  for (int step = 0; step < 5; ++step) {
    CAPTURE(step);
    model.zero_grad();
    auto loss = model.forward(batch_of(rank(), step, 4)).square().sum();
    std::vector<torch::Tensor> before;
    for (const auto& parameter : module->parameters()) {
      before.push_back(parameter.detach().clone());
    }
    const bool begins = step != 3;
    if (begins) {
      optimizer.begin_step({.lr = 0.0009765625});
    }
    loss.backward();
    if (context().device().is_cuda()) {
      torch::cuda::synchronize();
    }
    // The first step makes the state and is a usual one.
    const int changed = num_changed(module, before);
    CHECK((begins && step > 0 ? changed > 3 : changed == 0));
    optimizer.step(0.0009765625);
  }
}

TEST_CASE("a weighted backward leaves all updates to step") {
  Mlp overlapped;
  Mlp plain;
  DistributedDataParallel model(overlapped, group());
  DistributedDataParallel reference(plain, group());
  auto optimizer = make_optimizer(model, rule(OptimizerType::Sgd, true));
  auto expected = make_optimizer(reference, rule(OptimizerType::Sgd, false));
  for (int step = 0; step < 4; ++step) {
    model.zero_grad();
    reference.zero_grad();
    auto loss = model.forward(batch_of(rank(), step, 4)).sum();
    optimizer.begin_step({.lr = 0.0625});
    model.weighted_backward(loss, 3);
    optimizer.step(0.0625);
    reference.weighted_backward(reference.forward(batch_of(rank(), step, 4)).sum(), 3);
    expected.step(0.0625);
    require_same_weights(overlapped, plain);
  }
}

// As after an exception in backward that the caller caught, or a loss check that leaves step out.
TEST_CASE("a begun step that was never ended is told once, and training goes on") {
  Mlp module;
  DistributedDataParallel model(module, group(), with_cap(bucket_caps().back()));
  auto optimizer = make_optimizer(model, rule(OptimizerType::Sgd, true));
  const auto begin = [&](int step) {
    model.zero_grad();
    auto loss = model.forward(batch_of(rank(), step, 4)).sum();
    optimizer.begin_step({.lr = 0.0009765625});
    loss.backward();
  };
  begin(0);
  optimizer.step(0.0009765625);
  begin(1);
  REQUIRE_THROWS_WITH(begin(2),
                      Catch::Contains("never ended") && Catch::Contains(" of 6 parameters"));
  begin(3);
  optimizer.step(0.0009765625);
  begin(4);
  optimizer.step(0.0009765625);
}

TEST_CASE("who reads or writes weights waits for what is done to them beside backward") {
  Mlp module;
  DistributedDataParallel model(module, group());
  int waits = 0;
  model.reducer().set_bucket_listener([](const auto&, const auto&) {}, {}, [&] { ++waits; });
  const StateDict state = model.state_dict();
  CHECK(waits == 1);
  model.load_state_dict(state);
  CHECK(waits == 2);
  model.sync_module_states();
  CHECK(waits == 3);
  const torch::NoGradGuard no_grad;
  model.forward(batch_of(rank(), 0, 4));
  CHECK(waits > 3);
}

TEST_CASE("what cannot be overlapped is refused") {
  Mlp module;
  DdpOptions unused;
  unused.find_unused_parameters = true;
  {
    DistributedDataParallel model(module, group(), unused);
    REQUIRE_THROWS_WITH(make_optimizer(model, rule(OptimizerType::Sgd, true)),
                        Catch::Contains("find_unused_parameters"));
  }
  DistributedDataParallel model(module, group());
  OptimizerOptions list = rule(OptimizerType::Sgd, true);
  list.implementation = OptimizerImplementation::List;
  REQUIRE_THROWS_WITH(make_optimizer(model, list), Catch::Contains("implementation is list"));
  REQUIRE_THROWS_WITH(make_optimizer(model.named_parameters(), rule(OptimizerType::Sgd, true)),
                      Catch::Contains("not a DistributedDataParallel"));
  auto optimizer = make_optimizer(model, rule(OptimizerType::Sgd, true));
  REQUIRE_THROWS_WITH(optimizer.begin_step({.lr = 0.1, .clip_factor = 0.5}),
                      Catch::Contains("leave begin_step out"));
  for (int step = 0; step < 2; ++step) {
    model.zero_grad();
    auto loss = model.forward(batch_of(rank(), step, 4)).sum();
    optimizer.begin_step({.lr = 0.1});
    loss.backward();
    if (step == 0) {
      optimizer.step(0.1);
    }
  }
  REQUIRE_THROWS_WITH(optimizer.step({.lr = 0.1, .clip_factor = 0.5}),
                      Catch::Contains("parameters were updated already"));
}
