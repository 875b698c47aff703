// SPDX-License-Identifier: Apache-2.0
// User code that accesses gradients and parameters (D10 and D6 of the design), and grad slots.
#include <torch/csrc/autograd/custom_function.h>

#include "ddp/optim/make_optimizer.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "ops/shared/grad_slot.hpp"
#include "reduce/reducer.hpp"
#include "support/stderr_of.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

// y = x W; the backward writes the weight's gradient directly into its slot, like fused ops.
class SlotLinear : public torch::autograd::Function<SlotLinear> {
 public:
  static inline bool breaks = false;  // the backward throws after its write
  static torch::Tensor forward(torch::autograd::AutogradContext* ctx, const torch::Tensor& x,
                               const torch::Tensor& weight) {
    ctx->save_for_backward({x, weight});
    return x.matmul(weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto& x = saved[0];
    const auto& weight = saved[1];
    torch::Tensor dweight;
    if (auto* slot = ops::find_grad_slot(weight)) {
      const double beta = ops::begin_grad_write(weight, *slot);
      const auto product = x.t().matmul(grads[0]).to(slot->memory.scalar_type());
      if (beta == 0) {
        slot->memory.copy_(product);
      } else {
        slot->memory.add_(product);
      }
      TORCH_CHECK(!breaks, "broken");
    } else {
      dweight = x.t().matmul(grads[0]);
    }
    return {grads[0].matmul(weight.t()), dweight};
  }
};

struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(bool fused_in, bool plain_in = true) : fused(fused_in), plain(plain_in) {
    weight = register_parameter("weight", integers({4, 4}, 11));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = fused ? SlotLinear::apply(x, weight) : x.matmul(weight);
    return plain ? y.matmul(weight) : y;
  }
  bool fused, plain;
  torch::Tensor weight;
};
TORCH_MODULE(Tied);

}  // namespace

TEST_CASE("a tied weight with one fused and one plain gradient adds both") {
  for (const bool plain : {true, false}) {
    CAPTURE(plain);
    Tied module(true, plain);
    Tied reference(false, plain);
    DistributedDataParallel model(module, group());
    for (int step = 0; step < 4; ++step) {
      model.zero_grad();
      reference->zero_grad();
      const int micro_steps = step % 2 == 0 ? 1 : 3;
      for (int micro = 0; micro < micro_steps; ++micro) {
        std::optional<NoSync> guard;
        if (micro + 1 < micro_steps) {
          guard.emplace(model);
        }
        model.forward(batch_of(rank(), 10 * step + micro, 4)).sum().backward();
        (reference->forward(concatenated(10 * step + micro, 4)).sum() / world()).backward();
      }
      require_equal(grads_of(*module), grads_of(*reference));
    }
  }
}

TEST_CASE("a weighted mean of micro-steps whose gradients an op wrote into their slots") {
  Tied module(true, false);
  Tied reference(false, false);
  DistributedDataParallel model(module, group());
  for (int step = 0; step < 3; ++step) {
    CAPTURE(step);
    model.zero_grad();
    {
      const auto local = model.no_sync();
      model.weighted_backward(model.forward(batch_of(rank(), 10 * step, 4)).sum(), 2);
    }
    model.weighted_backward(model.forward(batch_of(rank(), 10 * step + 1, 4)).sum(), 2);
    reference->zero_grad();
    for (int micro = 0; micro < 2; ++micro) {
      (reference->forward(concatenated(10 * step + micro, 4)).sum() / (4 * world())).backward();
    }
    require_equal(grads_of(*module), grads_of(*reference));
  }
}

TEST_CASE("what an earlier backward wrote into a slot is not added to the next step's gradient") {
  for (const bool local : {false, true}) {
    CAPTURE(local);
    Tied module(true, false);
    Tied reference(false, false);
    DistributedDataParallel model(module, group());
    const auto own = batch_of(rank(), 0, 4);
    {
      std::optional<NoSync> guard;
      if (local) {
        guard.emplace(model);
      }
      // A user calls autograd::grad directly.
      const auto loss = model.forward(own).sum();
      const auto got = torch::autograd::grad({loss}, {module->weight}, {}, /*retain_graph=*/true);
      const auto wanted =
          torch::autograd::grad({reference->forward(own).sum()}, {reference->weight});
      require_equal(got, wanted);
      REQUIRE_FALSE(ops::find_grad_slot(module->weight)->written);
      // A backward that throws.
      SlotLinear::breaks = true;
      REQUIRE_THROWS_WITH(loss.backward(), Catch::Contains("broken"));
      SlotLinear::breaks = false;
      if (local) {
        model.forward(own).sum().backward();
      }
    }
    model.forward(own).sum().backward();
    const auto expected = mean_reference(reference, [&](Tied& plain) {
      return plain->forward(concatenated(0, 4)).sum() * (local ? 2 : 1);
    });
    require_equal(grads_of(*module), expected);
  }
}

TEST_CASE("a grad slot is gone when the wrapper is") {
  Tied module(true);
  {
    DistributedDataParallel model(module, group());
    REQUIRE(ops::find_grad_slot(module->weight) != nullptr);
  }
  REQUIRE(ops::find_grad_slot(module->weight) == nullptr);
  module->forward(batch_of(rank(), 0, 4)).sum().backward();
  REQUIRE(module->weight.grad().defined());
}

TEST_CASE("a backward that no forward of the wrapper announced is warned of once") {
  Mlp module;
  DistributedDataParallel model(module, group());
  const auto backward_of = [&](auto& called) {
    called->zero_grad();
    called->forward(batch_of(rank(), 0, 4)).sum().backward();
  };
  const auto announced = testing::stderr_of([&] {
    auto* wrapper = &model;
    backward_of(wrapper);
    const auto guard = model.no_sync();
    backward_of(wrapper);
    backward_of(wrapper);
  });
  CHECK(announced.empty());
  const auto local = testing::stderr_of([&] {
    auto* wrapper = &model;
    backward_of(wrapper);
    backward_of(module);
    backward_of(module);
    backward_of(wrapper);
    backward_of(module);
  });
  INFO(local);
  CHECK(testing::num_found(local, "model.forward(x) instead of module->forward(x)") ==
        (world() > 1 ? 1 : 0));
}

TEST_CASE("a second backward of one forward is local, and the warning names it") {
  Mlp module, plain;
  DistributedDataParallel model(module, group());
  const auto message = testing::stderr_of([&] {
    const auto loss = model.forward(batch_of(rank(), 0, 4)).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  });
  INFO(message);
  CHECK(testing::num_found(message, "one backward for each forward") == (world() > 1 ? 1 : 0));
  auto expected =
      mean_reference(plain, [&](Mlp& p) { return p->forward(concatenated(0, 4)).sum(); });
  plain->zero_grad();
  loss_of(plain, batch_of(rank(), 0, 4)).backward();
  const auto own = grads_of(*plain);
  for (size_t i = 0; i < own.size(); ++i) {
    expected[i] = expected[i] + own[i];
  }
  require_equal(grads_of(*module), expected);
}

TEST_CASE("a second backward that throws makes no later local backward warn") {
  Mlp module;
  DistributedDataParallel model(module, group());
  const auto message = testing::stderr_of([&] {
    const auto output = model.forward(batch_of(rank(), 0, 4));
    bool breaks = false;
    output.register_hook([&](const torch::Tensor&) { TORCH_CHECK(!breaks, "broken"); });
    output.sum().backward({}, /*retain_graph=*/true);
    breaks = true;
    REQUIRE_THROWS_WITH(output.sum().backward(), Catch::Contains("broken"));
    const auto guard = model.no_sync();
    loss_of(model, 1).backward();
  });
  CHECK(message.empty());
}

TEST_CASE("a foreign .grad is attached again") {
  Mlp module;
  Mlp reference;
  DistributedDataParallel model(module, group());
  for (int step = 0; step < 4; ++step) {
    reference->zero_grad();
    for (auto& parameter : module->parameters()) {
      parameter.mutable_grad() = torch::ones_like(parameter);  // the user's own tensor
    }
    model.forward(batch_of(rank(), step, 4)).sum().backward();
    auto expected = mean_reference(
        reference, [&](Mlp& plain) { return loss_of(plain, concatenated(step, 4)); });
    for (auto& grad : expected) {
      grad.add_(1);
    }
    require_equal(grads_of(*module), expected);
    REQUIRE(module->first->weight.grad().is_alias_of(model.reducer().gradients().bucket(0).buffer));
  }
}

TEST_CASE("some gradients set to undefined between micro-steps") {
  Mlp module;
  Mlp reference;
  DistributedDataParallel model(module, group());
  {
    auto guard = model.no_sync();
    model.forward(batch_of(rank(), 0, 4)).sum().backward();
  }
  module->second->weight.mutable_grad() = torch::Tensor();
  model.forward(batch_of(rank(), 1, 4)).sum().backward();

  (loss_of(reference, concatenated(0, 4)) / world()).backward();
  reference->second->weight.mutable_grad() = torch::Tensor();
  (loss_of(reference, concatenated(1, 4)) / world()).backward();
  require_equal(grads_of(*module), grads_of(*reference));
}

TEST_CASE("create_graph, sparse gradients and replaced parameters raise by name") {
  {
    Mlp module;
    DistributedDataParallel model(module, group());
    auto loss = model.forward(batch_of(rank(), 0, 4)).sum();
    REQUIRE_THROWS_WITH(loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true),
                        Catch::Contains("create_graph") && Catch::Contains("third."));
  }
  {
    torch::nn::Embedding module(torch::nn::EmbeddingOptions(5, 3).sparse(true));
    module->to(context().device());
    DistributedDataParallel model(module, group());
    auto loss = model.forward(torch::tensor({1, 2}).to(context().device())).sum();
    REQUIRE_THROWS_WITH(loss.backward(), Catch::Contains("weight") && Catch::Contains("sparse"));
  }
  {
    Mlp module;
    DistributedDataParallel model(module, group());
    module->to(torch::kDouble);
    REQUIRE_THROWS_WITH(
        model.forward(batch_of(rank(), 0, 4).to(torch::kDouble)),
        Catch::Contains("first.weight") && Catch::Contains("replaced after wrapping"));
  }
}

TEST_CASE("ranks whose hooks fire in different orders agree") {
  // Two towers; odd ranks build the graph in reverse, so their hooks fire in another order.
  struct TowersImpl : torch::nn::Module {
    TowersImpl() : a(register_module("a", Mlp(1))), b(register_module("b", Mlp(2))) {}
    torch::Tensor forward(const torch::Tensor& x, bool swapped) {
      if (swapped) {
        auto right = b->forward(x).sum();
        return right + a->forward(x).sum();
      }
      auto left = a->forward(x).sum();
      return left + b->forward(x).sum();
    }
    Mlp a{nullptr}, b{nullptr};
  };
  for (const double cap : bucket_caps()) {
    auto module = std::make_shared<TowersImpl>();
    auto reference = std::make_shared<TowersImpl>();
    DistributedDataParallel model(module, group(), with_cap(cap));
    for (int step = 0; step < 4; ++step) {
      model.zero_grad();
      model.forward(batch_of(rank(), step, 4), rank() % 2 == 1).backward();
      require_equal(grads_of(*module), mean_reference(reference, [&](auto& plain) {
                      return plain->forward(concatenated(step, 4), false);
                    }));
    }
  }
}

TEST_CASE("frozen parameters and ignored ones are left alone") {
  Mlp module;
  module->first->weight.set_requires_grad(false);
  DdpOptions options;
  options.parameters_to_ignore = {"second.bias"};
  DistributedDataParallel model(module, group(), options);
  model.forward(batch_of(rank(), 0, 4)).sum().backward();
  REQUIRE_FALSE(module->first->weight.grad().defined());
  REQUIRE(model.trained_parameters().size() == module->parameters().size() - 2);
  REQUIRE(model.named_parameters().size() == module->parameters().size());
  const auto parameters = model.parameters();
  REQUIRE(parameters.size() == module->parameters().size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    REQUIRE(parameters[i].is_same(module->parameters()[i]));
  }
  Mlp local;
  loss_of(local, batch_of(rank(), 0, 4)).backward();
  REQUIRE(torch::equal(module->second->bias.grad(), local->second->bias.grad()));
  model.zero_grad();
  for (const auto& parameter : parameters) {
    REQUIRE_FALSE(parameter.grad().defined());
  }

  options.parameters_to_ignore = {"second.bais"};
  REQUIRE_THROWS_WITH(DistributedDataParallel(module, group(), options),
                      Catch::Contains("second.bais"));
}

TEST_CASE("wrappers can be moved, also after their optimizers were made") {
  const bool zero1 = GENERATE(false, true);
  Mlp reference;
  std::vector<DistributedDataParallel<Mlp>> models;
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  for (int i = 0; i < 3; ++i) {
    DistributedDataParallel model(Mlp(), group());
    optimizers.push_back(make_optimizer(model, {.zero1 = zero1}));
    models.push_back(std::move(model));
  }
  for (int i = 0; i < 3; ++i) {
    auto& model = models[static_cast<size_t>(i)];
    model.forward(batch_of(rank(), 0, 4)).sum().backward();
    optimizers[static_cast<size_t>(i)]->step(1.0);
  }
  const auto means = mean_reference(
      reference, [&](Mlp& plain) { return plain->forward(concatenated(0, 4)).sum(); });
  for (auto& model : models) {
    for (size_t i = 0; i < means.size(); ++i) {
      REQUIRE(
          torch::equal(model.named_parameters()[i].tensor, reference->parameters()[i] - means[i]));
    }
  }
}

TEST_CASE("a parameter registered twice is reduced once") {
  struct SharedImpl : torch::nn::Module {
    SharedImpl() {
      layer = register_module("layer", torch::nn::Linear(4, 4));
      again = register_module("again", layer);
      const torch::NoGradGuard no_grad;
      layer->weight.copy_(integers({4, 4}, 5).cpu());
      layer->bias.copy_(integers({4}, 6).cpu());
      to(context().device());
    }
    torch::Tensor forward(const torch::Tensor& x) { return again(layer(x)); }
    torch::nn::Linear layer{nullptr}, again{nullptr};
  };
  auto module = std::make_shared<SharedImpl>();
  auto reference = std::make_shared<SharedImpl>();
  DistributedDataParallel model(module, group());
  REQUIRE(model.named_parameters().size() == 2);
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    model.forward(batch_of(rank(), step, 4)).sum().backward();
    require_equal(grads_of(*module), mean_reference(reference, [&](auto& plain) {
                    return plain->forward(concatenated(step, 4)).sum();
                  }));
  }
}
