// SPDX-License-Identifier: Apache-2.0
// Backwards that reach a forward's outputs late, not at all, or twice.
#include "ddp/ops/language.hpp"
#include "ddp/reduce/join.hpp"
#include "distributed/ddp_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

// `aside` is no output, and its layer's gradient is ready before the output's.
struct AsideImpl : torch::nn::Module {
  AsideImpl() { to(context().device()); }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = (x * trunk).sum();
    aside = y * head;
    return y;
  }
  torch::Tensor trunk = register_parameter("trunk", torch::ones({4}));
  torch::Tensor head = register_parameter("head", torch::ones({}));
  torch::Tensor aside;
};

// `aside` depends on the parameter alone, as does a penalty on the gradient by the input.
struct WeightImpl : torch::nn::Module {
  WeightImpl() { to(context().device()); }
  torch::Tensor forward(const torch::Tensor& x) {
    aside = weight.square().sum();
    return (x * weight).sum();
  }
  torch::Tensor weight = register_parameter("weight", torch::ones({4}));
  torch::Tensor aside;
};

// Runs the backward of the product with `weight` inside its own, as re-entrant checkpointing does.
struct Nested : torch::autograd::Function<Nested> {
  static torch::Tensor forward(torch::autograd::AutogradContext* ctx, const torch::Tensor& x,
                               const torch::Tensor* weight) {
    ctx->save_for_backward({x});
    ctx->saved_data["weight"] = *weight;
    return (x * weight->detach()).sum();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const torch::AutoGradMode records(true);
    const auto x = ctx->get_saved_variables()[0].detach();
    const auto weight = ctx->saved_data["weight"].toTensor();
    ((x * weight).sum() * grads[0]).backward();
    return {grads[0] * weight.detach(), torch::Tensor()};
  }
};

struct NestedImpl : torch::nn::Module {
  NestedImpl() { to(context().device()); }
  torch::Tensor forward(const torch::Tensor& x) { return Nested::apply(x, &weight); }
  torch::Tensor weight = register_parameter("weight", torch::ones({4}));
};

}  // namespace

TEST_CASE("a backward reduces gradients that it reaches before the output") {
  const bool names_inputs = GENERATE(false, true);
  const auto module = std::make_shared<AsideImpl>();
  DistributedDataParallel model(module, group());
  std::vector<torch::Tensor> kept;
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    const auto output = model.forward(torch::full({4}, rank() + 1.0, on_device()));
    kept.push_back(output);
    torch::autograd::backward({output + module->aside}, {}, {}, false,
                              names_inputs ? module->parameters() : std::vector<torch::Tensor>());
    const double mean = 0.5 * (world() + 1);
    REQUIRE(module->trunk.grad().eq(2 * mean).all().item<bool>());
    REQUIRE(module->head.grad().item<double>() == 4 * mean);
    const auto passes = num_passes(model);
    {
      const auto local = model.no_sync();
      (model.forward(torch::ones({4}, on_device())) + module->aside).backward();
    }
    REQUIRE(num_passes(model) == passes);
  }
}

TEST_CASE("a backward that reaches no output is reduced as in PyTorch") {
  const bool is_penalty = GENERATE(false, true);
  const bool follows_local = GENERATE(false, true);
  CAPTURE(is_penalty, follows_local);
  const auto module = std::make_shared<WeightImpl>();
  DistributedDataParallel model(module, group());
  const auto loss_of_step = [&] {
    const auto x = torch::ones({4}, on_device().requires_grad(true));
    const auto output = model.forward(x);
    const auto aside =
        is_penalty
            ? torch::autograd::grad({output}, {x}, {}, {}, /*create_graph=*/true)[0].square().sum()
            : module->aside;
    return aside * (rank() + 1);
  };
  const double own = 2.0 * (rank() + 1);
  const double mean = world() + 1.0;
  for (int step = 0; step < 3; ++step) {
    CAPTURE(step);
    model.zero_grad();
    torch::Tensor local_loss;
    if (follows_local) {
      const auto local = model.no_sync();
      local_loss = loss_of_step();
    }
    const auto loss = loss_of_step();
    const auto passes = num_passes(model);
    loss.backward();
    REQUIRE(num_passes(model) == passes + 1);
    REQUIRE(module->weight.grad().eq(mean).all().item<bool>());
    if (follows_local) {
      local_loss.backward();  // late, and no forward waits for it
      REQUIRE(num_passes(model) == passes + 1);
      REQUIRE(module->weight.grad().eq(mean + own).all().item<bool>());
    }
  }
}

TEST_CASE("a local backward stays local, whatever it reaches first, beside an open forward") {
  const auto module = std::make_shared<AsideImpl>();
  DistributedDataParallel model(module, group());
  const auto x = torch::full({4}, rank() + 1.0, on_device());
  const auto loss_of_step = [&] { return model.forward(x) + module->aside; };
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    torch::Tensor local_loss;
    {
      const auto local = model.no_sync();
      local_loss = loss_of_step();
    }
    const auto loss = loss_of_step();
    const auto passes = num_passes(model);
    local_loss.backward();
    REQUIRE(num_passes(model) == passes);
    REQUIRE(module->head.grad().item<double>() == 4.0 * (rank() + 1));
    loss.backward();
    REQUIRE(num_passes(model) == passes + 1);
    REQUIRE(module->head.grad().item<double>() == 2 * 4.0 * 0.5 * (world() + 1));
  }
}

TEST_CASE("a second backward of one forward is local, also where one rank keeps another output") {
  const bool on_all_ranks = GENERATE(false, true);
  CAPTURE(on_all_ranks);
  Mlp module, reference, own;
  DistributedDataParallel model(module, group());
  std::vector<torch::Tensor> kept;
  for (int step = 0; step < 3; ++step) {
    CAPTURE(step);
    model.zero_grad();
    const auto logged = loss_of(model, 90 + step);
    if (on_all_ranks || rank() == 0) {
      kept.push_back(logged);
    }
    const auto loss = loss_of(model, step);
    const auto passes = num_passes(model);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    REQUIRE(num_passes(model) == passes + 1);
    auto expected = mean_of_steps(reference, {step});
    own->zero_grad();
    own->forward(batch_of(rank(), step, 4)).sum().backward();
    for (size_t i = 0; i < expected.size(); ++i) {
      expected[i] = expected[i] + own->parameters()[i].grad();
    }
    require_equal(grads_of(*module), expected);
  }
}

TEST_CASE("torch::autograd::grad of an output is no backward of its forward") {
  Mlp module, reference;
  DistributedDataParallel model(module, group());
  const bool is_of_second = GENERATE(false, true);
  for (int step = 0; step < 2; ++step) {
    model.zero_grad();
    auto x = batch_of(rank(), 0, 4).requires_grad_();
    const auto read_gradient = [&](const torch::Tensor& loss) {
      torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true);
    };
    if (is_of_second) {
      const auto first = loss_of(model, 1);
      const auto second = model.forward(x).sum();
      read_gradient(second);
      first.backward();
      second.backward();
    } else {
      const auto loss = model.forward(x).sum();
      read_gradient(loss);
      {
        const auto local = model.no_sync();
        loss_of(model, 1).backward();
      }
      loss.backward();
    }
    require_equal(grads_of(*module), mean_of_steps(reference, {0, 1}));
  }
}

TEST_CASE("a late second backward is local and takes no other forward's place") {
  DdpOptions options;
  options.static_graph = GENERATE(false, true);
  CAPTURE(options.static_graph);
  Mlp module, reference, own;
  DistributedDataParallel model(module, group(), options);
  for (int step = 0; step < 4; ++step) {
    CAPTURE(step);
    model.zero_grad();
    const auto first = loss_of(model, 2 * step);
    first.backward({}, /*retain_graph=*/true);
    const auto second = loss_of(model, 2 * step + 1);
    model.zero_grad();
    first.backward();
    own->zero_grad();
    own->forward(batch_of(rank(), 2 * step, 4)).sum().backward();
    require_equal(grads_of(*module), grads_of(*own));
    model.zero_grad();
    second.backward();
    require_equal(grads_of(*module), mean_of_steps(reference, {2 * step + 1}));
  }
}

namespace {

// The nested backward of `aside` runs before the backward reaches the output.
struct CheckpointedAsideImpl : torch::nn::Module {
  CheckpointedAsideImpl() { to(context().device()); }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto hidden = x * trunk;
    const auto y = (hidden * head).sum();
    aside = ops::checkpoint(
        [this](const std::vector<torch::Tensor>& in) { return (in[0] * other).sum(); }, {hidden});
    return y;
  }
  torch::Tensor trunk = register_parameter("trunk", torch::ones({4}));
  torch::Tensor head = register_parameter("head", torch::ones({4}));
  torch::Tensor other = register_parameter("other", torch::ones({4}));
  torch::Tensor aside;
};

}  // namespace

TEST_CASE("a nested backward before the output is reduced with its outer one") {
  DdpOptions options;
  options.static_graph = GENERATE(false, true);
  options.find_unused_parameters = GENERATE(false, true);
  CAPTURE(options.static_graph, options.find_unused_parameters);
  const auto module = std::make_shared<CheckpointedAsideImpl>();
  DistributedDataParallel model(module, group(), options);
  const auto x = torch::full({4}, rank() + 1.0, on_device());
  const double mean = 0.5 * (world() + 1);
  for (int step = 0; step < 4; ++step) {
    CAPTURE(step);
    model.zero_grad();
    const auto output = model.forward(x);
    (output + module->aside).backward();
    REQUIRE(num_passes(model) == step + 1);
    REQUIRE(module->trunk.grad().eq(2 * mean).all().item<bool>());
    REQUIRE(module->head.grad().eq(mean).all().item<bool>());
    REQUIRE(module->other.grad().eq(mean).all().item<bool>());
  }
}

TEST_CASE("inside a join one backward follows, also if it reached no output") {
  const auto module = std::make_shared<WeightImpl>();
  DistributedDataParallel model(module, group());
  const auto x = torch::full({4}, rank() + 1.0, on_device());
  join(model, [&] {
    for (int step = 0; step < 2; ++step) {
      model.zero_grad();
      const auto output = model.forward(x);
      (module->aside * (rank() + 1)).backward();
      REQUIRE(module->weight.grad().eq(world() + 1.0).all().item<bool>());
      REQUIRE_THROWS_WITH(output.backward(), Catch::Contains("sum the losses"));
    }
  });
}

TEST_CASE("a backward that throws behind all gradients leaves no other one reduced") {
  const auto module = std::make_shared<NestedImpl>();
  DistributedDataParallel model(module, group());
  const auto input = [] { return torch::full({4}, rank() + 1.0, on_device().requires_grad(true)); };
  const double own = rank() + 1.0;
  const double mean = 0.5 * (world() + 1);
  for (int step = 0; step < 3; ++step) {
    CAPTURE(step);
    model.zero_grad();
    const auto x = input();
    x.register_hook([](const torch::Tensor&) { throw std::runtime_error("thrown late"); });
    REQUIRE_THROWS_WITH(model.forward(x).backward(), Catch::Contains("thrown late"));
    REQUIRE(module->weight.grad().eq(mean).all().item<bool>());
    model.zero_grad();
    const auto logged = model.forward(input());
    const auto passes = num_passes(model);
    {
      const auto local = model.no_sync();
      model.forward(input()).backward();
    }
    REQUIRE(num_passes(model) == passes);
    REQUIRE(module->weight.grad().eq(own).all().item<bool>());
    logged.backward();
    REQUIRE(num_passes(model) == passes + 1);
    REQUIRE(module->weight.grad().eq(2 * mean).all().item<bool>());
  }
}
