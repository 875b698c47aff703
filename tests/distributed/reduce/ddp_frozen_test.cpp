// SPDX-License-Identifier: Apache-2.0
// Parameters that are frozen between steps, as a GAN's discriminator is while its generator trains.
#include <optional>
#include <type_traits>

#include "ddp/reduce/join.hpp"
#include "distributed/optim/zero_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

void set_requires_grad(torch::nn::Module& module, bool on) {
  for (auto& parameter : module.parameters()) {
    parameter.set_requires_grad(on);
  }
}

// The noise or the real data of one rank in float64, where a sum in another order is nearly exact.
torch::Tensor noise_of(int r, int step) {
  return batch_of(r, step, 4).to(torch::kDouble) / 4;
}
torch::Tensor real_of(int r, int step) {
  return batch_of(r, step + 100, 3).to(torch::kDouble) / 4;
}
torch::Tensor whole(torch::Tensor (*part)(int, int), int step) {
  std::vector<torch::Tensor> parts;
  for (int r = 0; r < world(); ++r) {
    parts.push_back(part(r, step));
  }
  return torch::cat(parts);
}

struct Networks {
  torch::nn::Sequential generator{torch::nn::Linear(4, 6), torch::nn::ReLU(),
                                  torch::nn::Linear(6, 3)};
  torch::nn::Sequential discriminator{torch::nn::Linear(3, 6), torch::nn::Tanh(),
                                      torch::nn::Linear(6, 1)};
  Networks() {
    int64_t seed = 0;
    for (auto* module : {&generator, &discriminator}) {
      (*module)->to(context().device(), torch::kDouble);
      const torch::NoGradGuard no_grad;
      for (auto& parameter : (*module)->parameters()) {
        parameter.copy_(integers(parameter.sizes().vec(), ++seed) / 8);
      }
    }
  }
};

// One step of a GAN. `generate` and `judge` are the networks or their wrappers.
template <typename Generate, typename Judge, typename StepOptimizer>
void train_gan(Networks& networks, Generate& generate, Judge& judge, const torch::Tensor& noise,
               const torch::Tensor& real, bool no_sync, const StepOptimizer& step_optimizer) {
  set_requires_grad(*networks.discriminator, true);
  const auto fake = generate.forward(noise);
  networks.discriminator->zero_grad();
  torch::mse_loss(judge.forward(real), torch::ones({real.size(0), 1}, real.options())).backward();
  judge.forward(fake.detach()).square().mean().backward();
  step_optimizer(1);

  set_requires_grad(*networks.discriminator, false);
  networks.discriminator->zero_grad();
  networks.generator->zero_grad();
  std::optional<NoSync> scope;  // of the discriminator: the generator's backward is averaged
  if constexpr (std::is_base_of_v<DataParallelModel, Judge>) {
    if (no_sync) {
      scope.emplace(judge);
    }
  }
  torch::mse_loss(judge.forward(fake), torch::ones({real.size(0), 1}, real.options())).backward();
  for (const auto& parameter : networks.discriminator->parameters()) {
    REQUIRE_FALSE(parameter.grad().defined());
  }
  step_optimizer(0);
}

}  // namespace

TEST_CASE("a GAN with a frozen discriminator trains as plain LibTorch does") {
  const bool no_sync = GENERATE(false, true);
  Networks plain, ours;
  torch::optim::SGD plain_generator(
      plain.generator->parameters(),
      torch::optim::SGDOptions(0.25).momentum(0.5).weight_decay(0.25));
  torch::optim::SGD plain_discriminator(
      plain.discriminator->parameters(),
      torch::optim::SGDOptions(0.25).momentum(0.5).weight_decay(0.25));
  DistributedDataParallel generator(ours.generator, group());
  DistributedDataParallel discriminator(ours.discriminator, group());
  const OptimizerOptions rule{.weight_decay = 0.25, .momentum = 0.5};
  const auto of_generator = make_optimizer(generator, rule);
  const auto of_discriminator = make_optimizer(discriminator, rule);
  for (int step = 0; step < 6; ++step) {
    train_gan(plain, *plain.generator, *plain.discriminator, whole(noise_of, step),
              whole(real_of, step), no_sync,
              [&](int which) { (which == 0 ? plain_generator : plain_discriminator).step(); });
    train_gan(ours, generator, discriminator, noise_of(rank(), step), real_of(rank(), step),
              no_sync,
              [&](int which) { (which == 0 ? of_generator : of_discriminator)->step(0.25); });
  }
  for (const auto& [mine, expected] :
       {std::pair(ours.generator, plain.generator), {ours.discriminator, plain.discriminator}}) {
    for (size_t i = 0; i < expected->parameters().size(); ++i) {
      INFO("parameter " << i);
      REQUIRE(torch::allclose(mine->parameters()[i], expected->parameters()[i], 0, 1e-12));
    }
  }
  REQUIRE(discriminator.logging_data().num_synchronised_backwards == 12);  // none of the generator
}

TEST_CASE("a frozen layer has no gradient and stays as it is, the others' means are exact") {
  DdpOptions options = with_cap(GENERATE(from_range(bucket_caps())));
  options.find_unused_parameters = GENERATE(false, true);
  options.comm_hook = GENERATE(CommHookType::None, CommHookType::AllReduce);
  Mlp module, reference;
  DistributedDataParallel model(module, group(), options);
  auto optimizer = make_optimizer(model, {.weight_decay = 0.5, .momentum = 0.5});
  for (int step = 0; step < 8; ++step) {
    const bool is_frozen = step % 4 >= 2;
    for (auto* plain : {&module, &reference}) {
      set_requires_grad(*(*plain)->second, !is_frozen);
    }
    model.zero_grad();
    reference->zero_grad();
    model.forward(batch_of(rank(), step, 4)).sum().backward();
    require_equal(grads_of(*module), mean_reference(reference, [&](Mlp& plain) {
                    return plain->forward(concatenated(step, 4)).sum();
                  }));
    REQUIRE(module->second->weight.grad().defined() != is_frozen);
    const auto before = module->second->weight.detach().clone();
    optimizer->step(0.0);  // momentum changes; the weights stay integers
    REQUIRE(torch::equal(module->second->weight, before));
  }
}

TEST_CASE("freezing between forward and backward, and between two forwards") {
  Mlp module, reference;
  DistributedDataParallel model(module, group(), with_cap(1.0 / (1 << 20)));
  const auto freeze = [&](bool on) {
    for (auto* plain : {&module, &reference}) {
      set_requires_grad(*(*plain)->second, !on);
    }
  };
  const auto zero_grad = [&] {
    model.zero_grad();
    reference->zero_grad();
  };
  for (int step = 0; step < 3; ++step) {
    zero_grad();
    freeze(false);
    const auto loss = model.forward(batch_of(rank(), step, 4)).sum();
    const auto expected = reference->forward(concatenated(step, 4)).sum() / world();
    freeze(true);
    loss.backward();
    expected.backward();
    REQUIRE_FALSE(module->second->weight.grad().defined());
    require_equal(grads_of(*module), grads_of(*reference));

    zero_grad();
    const auto in_both = [&](auto& forward, const torch::Tensor& first,
                             const torch::Tensor& second) {
      freeze(step % 2 == 0);
      const auto one = forward(first).sum();
      freeze(step % 2 != 0);
      const auto other = forward(second).sum();
      freeze(false);
      return one + other;
    };
    auto ours = [&](const torch::Tensor& x) { return model.forward(x); };
    auto plain = [&](const torch::Tensor& x) { return reference->forward(x); };
    in_both(ours, batch_of(rank(), step, 4), batch_of(rank(), step + 50, 4)).backward();
    (in_both(plain, concatenated(step, 4), concatenated(step + 50, 4)) / world()).backward();
    REQUIRE(module->second->weight.grad().defined());
    require_equal(grads_of(*module), grads_of(*reference));
  }
}

TEST_CASE("a local gradient of a parameter that is frozen later is averaged") {
  Mlp module, reference;
  DistributedDataParallel model(module, group());
  {
    const auto scope = model.no_sync();
    model.forward(batch_of(rank(), 0, 4)).sum().backward();
  }
  (reference->forward(concatenated(0, 4)).sum() / world()).backward();
  for (auto* plain : {&module, &reference}) {
    set_requires_grad(*(*plain)->third, false);
  }
  model.forward(batch_of(rank(), 1, 4)).sum().backward();
  (reference->forward(concatenated(1, 4)).sum() / world()).backward();
  require_equal(grads_of(*module), grads_of(*reference));
}

TEST_CASE("zero_grad drops the local gradient of a parameter that is frozen next") {
  DdpOptions options;
  options.find_unused_parameters = GENERATE(false, true);
  Mlp module, reference;
  DistributedDataParallel model(module, group(), options);
  {
    const auto scope = model.no_sync();
    model.forward(batch_of(rank(), 0, 4)).sum().backward();
  }
  model.zero_grad();
  for (auto* plain : {&module, &reference}) {
    set_requires_grad(*(*plain)->second, false);
  }
  model.forward(batch_of(rank(), 1, 4)).sum().backward();
  REQUIRE_FALSE(module->second->weight.grad().defined());  // the optimizer skips it
  (reference->forward(concatenated(1, 4)).sum() / world()).backward();
  require_equal(grads_of(*module), grads_of(*reference));
}

TEST_CASE("a weighted_backward of a frozen model is refused and leaves no count for the next") {
  const bool is_local = GENERATE(false, true);
  Mlp module, reference;
  DistributedDataParallel model(module, group());
  set_requires_grad(*module, false);
  {
    std::optional<NoSync> scope;
    if (is_local) {
      scope.emplace(model);
    }
    const auto x = batch_of(rank(), 0, 4).requires_grad_();
    const auto loss_sum = model.forward(x).sum();
    REQUIRE_THROWS_WITH(model.weighted_backward(loss_sum, 12),
                        Catch::Contains("call it on the model that trains"));
    loss_sum.backward();
    REQUIRE(x.grad().defined());
  }
  set_requires_grad(*module, true);
  model.weighted_backward(model.forward(batch_of(rank(), 1, 4)).sum(), 4);
  (reference->forward(concatenated(1, 4)).sum() / (4 * world())).backward();
  require_equal(grads_of(*module), grads_of(*reference));
}

TEST_CASE("a weighted_backward counts if all parameters are frozen after its forward") {
  Mlp module, reference;
  DistributedDataParallel model(module, group());
  const auto loss_sum = model.forward(batch_of(rank(), 0, 4)).sum();
  set_requires_grad(*module, false);
  model.weighted_backward(loss_sum, 12);
  for (const auto& parameter : module->parameters()) {
    REQUIRE_FALSE(parameter.grad().defined());
  }
  set_requires_grad(*module, true);
  model.weighted_backward(model.forward(batch_of(rank(), 1, 4)).sum(), 4);
  (reference->forward(concatenated(1, 4)).sum() / (4 * world())).backward();
  require_equal(grads_of(*module), grads_of(*reference));
}

TEST_CASE("a backward of parameters that were frozen after its forward is no gradient that waits") {
  Mlp module, reference;
  DistributedDataParallel model(module, group());
  {
    const auto no_sync = model.no_sync();
    model.weighted_backward(model.forward(batch_of(rank(), 0, 4)).sum(), 4);
    const auto loss_sum = model.forward(batch_of(rank(), 2, 4)).sum();
    set_requires_grad(*module, false);
    loss_sum.backward();  // a gradient would be refused while those with counts wait
    set_requires_grad(*module, true);
  }
  model.weighted_backward(model.forward(batch_of(rank(), 1, 4)).sum(), 4);
  const auto whole =
      reference->forward(concatenated(0, 4)).sum() + reference->forward(concatenated(1, 4)).sum();
  (whole / (8 * world())).backward();
  require_equal(grads_of(*module), grads_of(*reference));
}

TEST_CASE("with ZeRO-1 freezing gives the weights of a whole optimizer") {
  Pieces whole_module, sharded_module;
  DistributedDataParallel whole_model(whole_module, group());
  DistributedDataParallel sharded_model(sharded_module, group());
  const auto whole_rule = make_optimizer(whole_model, rule(OptimizerType::AdamW, false));
  const auto sharded_rule = make_optimizer(sharded_model, rule(OptimizerType::AdamW, true));
  for (int step = 0; step < 6; ++step) {
    for (auto* module : {&whole_module, &sharded_module}) {
      for (const size_t frozen : {0, 2}) {
        (*module)->weights[frozen].set_requires_grad(step / 2 != 1);
      }
    }
    const auto before = sharded_module->weights[2].detach().clone();
    for (auto* model : {&whole_model, &sharded_model}) {
      model->zero_grad();
      model->forward(batch(step)).backward();
    }
    whole_rule->step(0.125);
    sharded_rule->step(0.125);
    require_same_weights(sharded_module, whole_module);
    REQUIRE(torch::equal(sharded_module->weights[2], before) == (step / 2 == 1));
  }
}

TEST_CASE("ranks that freeze different parameters throw, and name the first") {
  if (world() == 1) {
    return;
  }
  Mlp module;
  DistributedDataParallel model(module, group());
  model.forward(batch_of(rank(), 0, 4)).sum().backward();
  module->second->weight.set_requires_grad(false);
  module->third->bias.set_requires_grad(rank() == 0);
  REQUIRE_THROWS_WITH(
      model.forward(batch_of(rank(), 1, 4)),
      Catch::Contains(
          "parameter third.bias requires a gradient on rank 0 but is frozen on rank 1"));
}

TEST_CASE("in a join, ranks without input skip a model that is frozen") {
  Mlp module, judge_module;
  DistributedDataParallel model(module, group()), judge(judge_module, group());
  set_requires_grad(*judge_module, false);
  join(judge, [&] {
    for (int batch = 0; batch < 2 - rank() % 2; ++batch) {
      const auto x = batch_of(rank(), batch, 4).requires_grad_();
      judge.forward(x).sum().backward();
      REQUIRE(x.grad().defined());
    }
  });
  set_requires_grad(*judge_module, true);
  judge.forward(batch_of(rank(), 5, 4)).sum().backward();
  Mlp reference;
  require_equal(grads_of(*judge_module), mean_reference(reference, [&](Mlp& plain) {
                  return plain->forward(concatenated(5, 4)).sum();
                }));
}
