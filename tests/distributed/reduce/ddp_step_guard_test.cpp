// SPDX-License-Identifier: Apache-2.0
// No step and no checkpoint uses gradients or weights that no backward made equal on all ranks.
#include "ddp/optim/make_optimizer.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "support/stderr_of.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

// A gradient penalty reaches the weights of `first`, and not the bias of `last`.
struct CriticImpl : torch::nn::Module {
  CriticImpl() {
    first = register_module("first", torch::nn::Linear(4, 3));
    last = register_module("last", torch::nn::Linear(3, 1));
    to(context().device());
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(Critic);

torch::Tensor penalty_of(const torch::Tensor& scores, const torch::Tensor& x) {
  const auto grads = torch::autograd::grad({scores.sum()}, {x}, {}, /*retain_graph=*/true,
                                           /*create_graph=*/true);
  return grads[0].norm();
}

void run_penalty(DistributedDataParallel<Critic>& model, bool reaches_all) {
  auto x = batch_of(rank(), 0, 4).requires_grad_();
  const auto scores = model.forward(x);
  auto loss = penalty_of(scores, x);
  if (reaches_all) {
    loss = loss + 0 * scores.sum();
  }
  loss.backward();
}

void freeze(torch::nn::Module& module) {
  for (auto& parameter : module.parameters()) {
    parameter.requires_grad_(false);
  }
}

}  // namespace

TEST_CASE("after an incomplete backward no step, checkpoint or frozen forward follows") {
  Critic module;
  DistributedDataParallel model(module, group());
  Mlp other_module;
  DistributedDataParallel other(other_module, group());
  const auto flat = make_optimizer(model, {.type = OptimizerType::Sgd});
  const auto of_parameters = make_optimizer(NamedParameters{{"last.bias", module->last->bias}},
                                            {.type = OptimizerType::Sgd});
  const auto wrapped = wrap_optimizer(
      std::make_shared<torch::optim::SGD>(module->parameters(), 0.1), model.named_parameters());
  const auto of_other = make_optimizer(other, {.type = OptimizerType::Sgd});
  loss_of(other, 0).backward();
  run_penalty(model, /*reaches_all=*/false);

  const auto refuses = [](const auto& call) {
    REQUIRE_THROWS_WITH(call(), Catch::Contains("without a gradient: last.bias") &&
                                    Catch::Contains("+ 0 * output.sum()"));
  };
  refuses([&] { flat->step(0.1); });
  refuses([&] { of_parameters->step(0.1); });
  refuses([&] { wrapped->step(); });
  refuses([&] { clip_grad_norm_(model, 1.0); });
  refuses([&] { model.state_dict(); });
  REQUIRE_NOTHROW(of_other->step(0.1));  // of another model
  freeze(*module);
  refuses([&] { model.forward(batch_of(rank(), 1, 4)); });
}

TEST_CASE("in a join the next forward names the parameters that an incomplete backward left out") {
  Critic module;
  DistributedDataParallel model(module, group());
  REQUIRE_THROWS_WITH(join(model,
                           [&] {
                             run_penalty(model, /*reaches_all=*/false);
                             model.forward(batch_of(rank(), 1, 4));
                           }),
                      Catch::Contains("without a gradient: last.bias"));
}

TEST_CASE("gradients that zero_grad() dropped stop neither a checkpoint nor a step") {
  Critic module;
  DistributedDataParallel model(module, group());
  const auto optimizer = make_optimizer(model, {.type = OptimizerType::Sgd});
  SECTION("of an incomplete backward") {
    run_penalty(model, /*reaches_all=*/false);
  }
  SECTION("of a backward that threw") {
    const auto scores = model.forward(batch_of(rank(), 0, 4));
    module->first->weight.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("in a hook"); });
    REQUIRE_THROWS(scores.sum().backward());
    REQUIRE_THROWS_WITH(optimizer->step(0.1), Catch::Contains("ended with an exception"));
  }
  model.zero_grad();
  REQUIRE_NOTHROW(model.state_dict());
  REQUIRE_NOTHROW(optimizer->step(0.1));
}

TEST_CASE("a local norm may be measured before the synchronised backward") {
  Mlp module;
  DistributedDataParallel model(module, group());
  {
    const NoSync guard(model);
    model.weighted_backward(loss_of(model, 0), 3);
  }
  REQUIRE_NOTHROW(clip_grad_norm_(model, 0));
}

TEST_CASE("a penalty that reaches all parameters has the mean of all ranks' gradients") {
  Critic module;
  DistributedDataParallel model(module, group());
  Critic reference;
  for (size_t i = 0; i < module->parameters().size(); ++i) {
    reference->parameters()[i].data().copy_(module->parameters()[i].data());
  }
  const auto optimizer = make_optimizer(model, {.type = OptimizerType::Sgd});
  run_penalty(model, /*reaches_all=*/true);
  torch::Tensor sum = torch::zeros({}, on_device());
  for (int r = 0; r < world(); ++r) {
    auto x = batch_of(r, 0, 4).requires_grad_();
    sum = sum + penalty_of(reference->forward(x), x);
  }
  (sum / world()).backward();
  REQUIRE(torch::allclose(module->first->weight.grad(), reference->first->weight.grad()));
  REQUIRE_NOTHROW(optimizer->step(0.1));
}

TEST_CASE("a step refuses sums of weighted_backward under no_sync() that nothing averaged") {
  Mlp module;
  DistributedDataParallel model(module, group());
  const auto optimizer = make_optimizer(model, {.type = OptimizerType::Sgd});
  const auto local_backward = [&] {
    const NoSync guard(model);
    model.weighted_backward(loss_of(model, 0), 3);
  };
  local_backward();
  REQUIRE_THROWS_WITH(optimizer->step(0.1), Catch::Contains("this rank's sums"));
  REQUIRE_NOTHROW(model.state_dict());  // a save between two micro-batches
  model.weighted_backward(loss_of(model, 1), 3);
  REQUIRE_NOTHROW(optimizer->step(0.1));
  optimizer->zero_grad();
  local_backward();
  optimizer->zero_grad();  // drops the sums
  REQUIRE_NOTHROW(optimizer->step(0.1));
}

TEST_CASE("a step with gradients of backward() under no_sync() warns once, among several ranks") {
  Mlp module;
  DistributedDataParallel model(module, group());
  const auto optimizer = make_optimizer(model, {.type = OptimizerType::Sgd});
  const auto local_step = [&] {
    {
      const NoSync guard(model);
      loss_of(model, 0).backward();
    }
    optimizer->step(0.1);
  };
  const auto warns = [&] {
    return testing::stderr_of(local_step).find("are not averaged") != std::string::npos;
  };
  REQUIRE(warns() == (world() > 1));
  REQUIRE_FALSE(warns());
}

TEST_CASE("a loss without a graph is refused with the form for a rank without samples") {
  Mlp module;
  DistributedDataParallel model(module, group());
  REQUIRE_THROWS_WITH(model.weighted_backward(torch::zeros({}, on_device()), 0),
                      Catch::Contains("0 * output.sum()"));
}

TEST_CASE("a checkpoint refuses a parameter that was registered after wrapping") {
  Critic module;
  DistributedDataParallel model(module, group());
  REQUIRE_NOTHROW(model.state_dict());
  module->register_module("late", torch::nn::Linear(1, 1));
  REQUIRE_THROWS_WITH(model.state_dict(),
                      Catch::Contains("late.weight") && Catch::Contains("wrap the model again"));
}
