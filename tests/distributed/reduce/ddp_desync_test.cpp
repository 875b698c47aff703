// SPDX-License-Identifier: Apache-2.0
// ddp.desync_check_every: bits that change on one rank alone are found and named, and equal
// replicas raise no alarm.
#include <random>

#include "ddp/amp/amp.hpp"
#include "ddp/optim/ema.hpp"
#include "ddp/reduce/join.hpp"
#include "ddp/train/graphed_step.hpp"
#include "distributed/optim/zero_test_utils.hpp"
#include "support/fuse.hpp"
#include "support/message_of.hpp"
#include "support/stderr_of.hpp"

using namespace ddp;
using namespace ddp::test;
using ::testing::message_of;

namespace {

DdpOptions checked(int64_t every, DesyncPolicy policy = DesyncPolicy::Error) {
  DdpOptions options;
  options.desync_check_every = every;
  options.desync_policy = policy;
  return options;
}

struct Kind {
  OptimizerType type;
  OptimizerImplementation implementation;
  torch::ScalarType dtype = torch::kFloat;
  bool zero1 = false;
};

std::vector<Kind> kinds() {
  using enum OptimizerType;
  constexpr auto kList = OptimizerImplementation::List;
  constexpr auto kFlat = OptimizerImplementation::Flat;
  return {{Sgd, kList},   {Sgd, kFlat, torch::kBFloat16},
          {AdamW, kFlat}, {Adam, kList, torch::kHalf},
          {Lamb, kFlat},  {AdamW, kFlat, torch::kBFloat16},
          {Muon, kFlat},  {Muon, kList, torch::kBFloat16}};
}

OptimizerOptions options_of(const Kind& kind) {
  auto options = rule(kind.type, kind.zero1);
  options.implementation = kind.implementation;
  return options;
}

/// What ranks have in common, by the names of messages.
NamedParameters common_tensors(Trainer& trainer, const Ema& ema) {
  NamedParameters all;
  for (const auto& [name, tensor] : trainer.model.named_parameters()) {
    all.push_back({"parameter " + name, tensor});
  }
  for (const auto& [key, tensor] : trainer.optimizer->replicated_state().tensors) {
    all.push_back({key.slot + " of " + key.parameter, tensor});
  }
  for (const auto& [name, tensor] : ema.averages()) {
    all.push_back({"EMA of " + name, tensor});
  }
  std::erase_if(all, [](const auto& entry) { return entry.tensor.numel() == 0; });
  return all;
}

struct Plant {
  at::Tensor tensor;
  int rank;
  int64_t bit;

  /// Does it on its rank, or undoes it.
  void flip() const {
    if (test::rank() == rank) {
      auto* byte = static_cast<uint8_t*>(tensor.data_ptr()) + bit / 8;
      at::from_blob(byte, {1}, at::TensorOptions(at::kByte).device(tensor.device()))
          .bitwise_xor_(1 << (bit % 8));
    }
  }
};

/// Equal on all ranks.
Plant random_plant(std::mt19937& random, const at::Tensor& tensor) {
  const auto num_bits = 8 * static_cast<uint64_t>(tensor.nbytes());
  const auto bit = static_cast<int64_t>((random() + (uint64_t{random()} << 32)) % num_bits);
  return {tensor, static_cast<int>(random() % static_cast<unsigned>(world())), bit};
}

std::string name_of(int rank) {
  return concat("rank ", rank, " (", context().membership().hosts[static_cast<size_t>(rank)], ")");
}

/// The message of a check that finds the plant.
std::string expected_message(const std::string& what, int rank) {
  return world() == 2 ? concat(what, " differs between ", name_of(0), " and ", name_of(1))
                      : concat(what, " differs on ", name_of(rank), " from the other ", world() - 1,
                               " ranks");
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Whether all ranks have the same bits.
bool are_replicas(const at::Tensor& tensor) {
  const auto mine = tensor.detach().contiguous().view({-1}).view(at::kByte);
  const auto all = at::empty({world(), mine.numel()}, mine.options());
  group()->all_gather(all, mine)->wait();
  return all.eq(all[0]).all().item<bool>();
}

/// Its backward throws half way.
struct FusedMlpImpl : MlpImpl {
  torch::Tensor forward(torch::Tensor x) {
    return third(Fuse::apply(torch::relu(second(torch::relu(first(x))))));
  }
};
TORCH_MODULE(FusedMlp);

void train_step(DistributedDataParallel<Mlp>& model, Optimizer& optimizer, int64_t step) {
  model.zero_grad();
  loss_of(model, step).backward();
  optimizer.step(0.0625);
}

}  // namespace

TEST_CASE("each of 1,000 planted bits is found at the next check and named") {
  std::mt19937 random(17);
  for (const Kind& kind : kinds()) {
    CAPTURE(kind.type, kind.implementation, kind.dtype);
    Trainer trainer(options_of(kind), checked(1), kind.dtype);
    Ema ema(trainer.model);
    for (int64_t i = 0; i < 170; ++i) {
      if (i % 17 == 0) {
        trainer.train(i);
        ema.update();
        trainer.model.zero_grad();
        trainer.backward(i);
      }
      const auto all = common_tensors(trainer, ema);
      const auto& [what, tensor] = all[random() % all.size()];
      const auto plant = random_plant(random, tensor);
      plant.flip();
      const auto message = message_of<MismatchError>([&] { trainer.optimizer->step(0.0625); });
      plant.flip();
      INFO("bit " << plant.bit << " of " << what << " on rank " << plant.rank << ": " << message);
      REQUIRE(contains(message, expected_message(what, plant.rank)));
    }
  }
}

TEST_CASE("a bit that survives its update is found within as many steps as the setting says") {
  constexpr int64_t kEvery = 4;
  std::mt19937 random(5);
  int found = 0;
  for (const Kind& kind : kinds()) {
    CAPTURE(kind.type, kind.implementation, kind.dtype);
    for (int trial = 0; trial < 8; ++trial) {
      Trainer trainer(options_of(kind), checked(kEvery), kind.dtype);
      Ema ema(trainer.model);
      const auto planted_at = static_cast<int64_t>(2 + random() % 4);
      std::string what;
      for (int64_t step = 1; step <= 12; ++step) {
        if (step == planted_at) {
          const auto all = common_tensors(trainer, ema);
          const auto chosen = all[random() % all.size()];
          what = chosen.name;
          random_plant(random, chosen.tensor).flip();
        }
        trainer.model.zero_grad();
        trainer.backward(step);
        bool are_equal = true;
        for (const auto& [name, tensor] : common_tensors(trainer, ema)) {
          are_equal = are_equal && are_replicas(tensor);
        }
        INFO(what << " changed before step " << planted_at << ", step " << step);
        const auto message = message_of<MismatchError>([&] { trainer.optimizer->step(0.0625); });
        REQUIRE(message.empty() == (are_equal || step % kEvery != 0));
        if (!message.empty()) {
          CHECK(step < planted_at + kEvery);
          CHECK(contains(message, concat("(equal in step ", step - kEvery, ")")) ==
                (step > kEvery));
          ++found;
          break;
        }
        ema.update();
      }
    }
  }
  CHECK(found > 30);  // an update overwrites some bits
}

TEST_CASE("equal replicas raise no alarm") {
  auto all = kinds();
  all.push_back({OptimizerType::AdamW, OptimizerImplementation::Flat, torch::kBFloat16, true});
  all.push_back({OptimizerType::Sgd, OptimizerImplementation::Flat, torch::kFloat, true});
  for (const Kind& kind : all) {
    CAPTURE(kind.type, kind.implementation, kind.dtype, kind.zero1);
    Trainer trainer(options_of(kind), checked(1), kind.dtype);
    Ema ema(trainer.model);
    GradScaler scaler({.grad_scaling = GradScaling::On, .growth_interval = 2});
    for (int64_t step = 0; step < 12; ++step) {
      trainer.model.zero_grad();
      auto loss = trainer.model.forward(batch(step));
      if (step % 5 == 1 && rank() == 0) {
        loss = loss * std::numeric_limits<float>::infinity();  // all ranks skip the update
      }
      scaler.scale(loss).backward();
      scaler.step(*trainer.optimizer, 0.0625);
      scaler.update();
      ema.update();
    }
  }
}

TEST_CASE("the majority repairs the others") {
  if (world() < 3) {
    const auto message = message_of<SettingsError>(
        [] { Trainer(rule(OptimizerType::Sgd, false), checked(1, DesyncPolicy::Repair)); });
    CHECK(message.empty() == (world() == 1));
    return;
  }
  std::mt19937 random(3);
  for (const Kind& kind : kinds()) {
    CAPTURE(kind.type, kind.implementation, kind.dtype);
    Trainer trainer(options_of(kind), checked(1, DesyncPolicy::Repair), kind.dtype);
    Trainer reference(options_of(kind), {}, kind.dtype);
    Ema ema(trainer.model);
    for (int64_t step = 0; step < 6; ++step) {
      if (step > 2) {
        const auto all = common_tensors(trainer, ema);
        for (int i = 0; i < 3; ++i) {
          auto plant = random_plant(random, all[random() % all.size()].tensor);
          plant.rank = static_cast<int>(step) % world();  // so that there is a majority
          plant.flip();
        }
      }
      trainer.model.zero_grad();
      reference.model.zero_grad();
      trainer.backward(step);
      reference.backward(step);
      const auto log = ::testing::stderr_of([&] { trainer.optimizer->step(0.0625); });
      CHECK(contains(log, "repaired from the majority") == (step > 2 && rank() == 0));
      reference.optimizer->step(0.0625);
      require_same_weights(trainer.module, reference.module);
    }
    require_same_state(trainer.optimizer->state_dict(), reference.optimizer->state_dict());
  }
}

TEST_CASE("without a majority a repair is refused") {
  if (world() < 3) {
    return;
  }
  Trainer trainer(rule(OptimizerType::Sgd, false), checked(1, DesyncPolicy::Repair));
  trainer.train(0);
  trainer.backward(1);
  {
    const torch::NoGradGuard no_grad;
    trainer.module->weights[1].add_(rank());
  }
  const auto message = message_of<MismatchError>([&] { trainer.optimizer->step(0.0625); });
  CHECK(contains(message, "parameter w1 differs between "));
  CHECK(contains(message, "more than half"));
}

TEST_CASE("a warning lets the run go on") {
  Trainer trainer(rule(OptimizerType::Sgd, false), checked(2, DesyncPolicy::Warn));
  trainer.train(0);
  Plant{trainer.module->weights[2], world() - 1, 77}.flip();
  const auto log = ::testing::stderr_of([&] {
    for (int64_t step = 1; step < 5; ++step) {
      trainer.train(step);
    }
  });
  const bool warns = world() > 1 && rank() == 0;
  CHECK(::testing::num_found(log, "parameter w2 differs") == (warns ? 2 : 0));
}

TEST_CASE("ZeRO's parts of the state are not compared, its weights are") {
  Trainer trainer(rule(OptimizerType::AdamW, true), checked(1));
  trainer.train(0);
  trainer.train(1);
  if (world() == 1) {
    return;
  }
  trainer.backward(2);
  const Plant plant{trainer.module->weights[4], 1, 1000};
  plant.flip();
  const auto message = message_of<MismatchError>([&] { trainer.optimizer->step(0.0625); });
  CHECK(contains(message, expected_message("parameter w4", 1)));
  plant.flip();
  trainer.optimizer->step(0.0625);
}

TEST_CASE("frozen parameters are compared, ignored ones are not") {
  Mlp module;
  module->first->weight.set_requires_grad(false);
  auto options = checked(1);
  options.parameters_to_ignore = {"third.bias"};
  DistributedDataParallel model(module, group(), options);
  auto optimizer = make_optimizer(model, {.momentum = 0.5});
  const auto train = [&](int64_t step) { train_step(model, *optimizer, step); };
  {
    const torch::NoGradGuard no_grad;
    module->third->bias.fill_(rank());
  }
  train(0);
  module->second->bias.set_requires_grad(false);
  train(1);
  for (const auto& [what, tensor] :
       {std::pair("parameter first.weight", module->first->weight),
        {"parameter second.bias", module->second->bias},
        {"momentum_buffer of second.bias",
         optimizer->replicated_state().tensors.at({"second.bias", "momentum_buffer"})}}) {
    const Plant plant{tensor, world() - 1, 9};
    plant.flip();
    const auto message = message_of<MismatchError>([&] { train(2); });
    CHECK(contains(message, what) == (world() > 1));
    plant.flip();
  }
  train(3);
}

TEST_CASE("any optimizer compares the models whose parameters it steps") {
  Mlp module;
  auto options = checked(2);
  options.name = "generator";
  DistributedDataParallel model(module, group(), options);
  const auto optimizer = wrap_optimizer(
      std::make_shared<torch::optim::Adam>(module->parameters(), torch::optim::AdamOptions(0.125)),
      model.named_parameters());
  const auto train = [&](int64_t step) {
    model.zero_grad();
    loss_of(model, step).backward();
    optimizer->step();
  };
  train(0);
  const Plant plant{optimizer->replicated_state().tensors.at({"third.bias", "exp_avg"}), 0, 20};
  plant.flip();
  const auto message = message_of<MismatchError>([&] { train(1); });
  CHECK(contains(message, "exp_avg of third.bias") == (world() > 1));
  CHECK(contains(message, "of model 'generator'") == (world() > 1));
}

TEST_CASE("ranks that keep different state are named") {
  if (world() == 1) {
    return;
  }
  Mlp module;
  DistributedDataParallel model(module, group(), checked(2));
  auto optimizer = make_optimizer(model, {.momentum = 0.5});
  const auto train = [&](int64_t step, bool drops) {
    model.zero_grad();
    loss_of(model, step).backward();
    if (drops) {
      module->second->bias.mutable_grad().reset();
    }
    optimizer->step(0.0);
  };
  train(0, rank() == 1);
  const auto message = message_of<MismatchError>([&] { train(1, false); });
  CHECK(contains(message, "different optimizer state"));
  CHECK(contains(message, "momentum_buffer of second.bias"));
}

TEST_CASE("steps of a join, in which ranks make different numbers of them, are not counted") {
  Mlp module;
  DistributedDataParallel model(module, group(), checked(2));
  auto optimizer = make_optimizer(model, {});
  const auto train = [&](int64_t step) { train_step(model, *optimizer, step); };
  train(0);
  join(model, [&] {
    for (int64_t step = 1; step < 2 + rank(); ++step) {
      train(step);
    }
  });
  const Plant plant{module->first->bias, 0, 3};
  plant.flip();
  CHECK(message_of<MismatchError>([&] { train(9); }).empty() == (world() == 1));
  plant.flip();
}

TEST_CASE("a GraphedStep checks after the same steps") {
  Mlp module;
  DistributedDataParallel model(module, group(), checked(3));
  auto optimizer = make_optimizer(model, {.momentum = 0.5});
  GraphedStep step(context(), {.models = {&model}, .optimizers = {optimizer.get()}},
                   [&](const at::Tensor& batch, const StepScalars& scalars) {
                     model.zero_grad();
                     const auto loss = model.forward(batch).sum();
                     loss.backward();
                     optimizer->step(scalars);
                     return loss.detach();
                   });
  const auto run = [&](int64_t i) { step(batch_of(rank(), i, 4), {.lr = 0.0625, .step = i}); };
  run(0);
  const Plant plant{module->second->weight, world() - 1, 40};
  plant.flip();
  run(1);
  const auto message = message_of<MismatchError>([&] { run(2); });
  CHECK(contains(message, "second.weight") == (world() > 1));
}

TEST_CASE("state of parameters that are not the model's is not compared") {
  Mlp module;
  auto options = checked(1);
  options.parameters_to_ignore = {"third.bias"};
  DistributedDataParallel model(module, group(), options);
  auto own = torch::zeros({3}, on_device().requires_grad(true));
  NamedParameters parameters{{"own", own}};
  std::vector<at::Tensor> tensors{own};
  for (const auto& entry : module->named_parameters()) {
    parameters.push_back({entry.key(), entry.value()});
    tensors.push_back(entry.value());
  }
  const auto optimizer = wrap_optimizer(
      std::make_shared<torch::optim::Adam>(tensors, torch::optim::AdamOptions(0.125)), parameters);
  const auto train = [&](int64_t step) {
    optimizer->zero_grad();
    (loss_of(model, step) + (own * (1 + rank())).sum()).backward();
    module->third->bias.mutable_grad() = torch::full_like(module->third->bias, rank());
    optimizer->step();
  };
  for (int64_t step = 0; step < 3; ++step) {
    train(step);
  }
  const Plant plant{optimizer->replicated_state().tensors.at({"third.weight", "exp_avg"}), 0, 20};
  plant.flip();
  CHECK(contains(message_of<MismatchError>([&] { train(3); }), "exp_avg of third.weight"));
}

TEST_CASE("an Ema that some ranks have is not compared") {
  Mlp module;
  DistributedDataParallel model(module, group(), checked(1));
  auto optimizer = make_optimizer(model, {.momentum = 0.5});
  std::optional<Ema> ema;
  if (rank() == 0) {
    ema.emplace(model);
  }
  const auto train = [&](int64_t step) { train_step(model, *optimizer, step); };
  train(0);
  train(1);
  Plant{module->second->weight, 1, 9}.flip();
  CHECK(contains(message_of<MismatchError>([&] { train(2); }),
                 expected_message("parameter second.weight", 1)));
}

TEST_CASE("a warning about different state lets the run go on and compares the rest") {
  Mlp module;
  DistributedDataParallel model(module, group(), checked(1, DesyncPolicy::Warn));
  auto optimizer = make_optimizer(model, {.momentum = 0.5});
  const auto train = [&](int64_t step) {
    model.zero_grad();
    loss_of(model, step).backward();
    if (rank() == 1) {
      module->second->bias.mutable_grad().reset();
    }
    optimizer->step(0.0);
  };
  const auto log = ::testing::stderr_of([&] {
    for (int64_t step = 0; step < 4; ++step) {
      train(step);
    }
    Plant{module->third->weight, 1, 9}.flip();
    train(4);
  });
  CHECK(::testing::num_found(log, "different optimizer state") == (rank() == 0 ? 1 : 0));
  CHECK(::testing::num_found(log, "parameter third.weight differs") == (rank() == 0 ? 1 : 0));
}

TEST_CASE("a step behind a backward that threw is not checked, because its reductions come first") {
  auto options = checked(1);
  options.bucket_cap_mb = 1.0 / (1 << 20);
  FusedMlp module;
  DistributedDataParallel model(module, group(), options);
  auto optimizer = make_optimizer(model, {.momentum = 0.5});
  for (int64_t step = 0; step < 6; ++step) {
    model.zero_grad();
    const auto loss = model.forward(batch_of(rank(), step, 4)).sum();
    if (step % 3 == 2) {
      Fuse::blows = true;
      REQUIRE_THROWS_WITH(loss.backward(), Catch::Contains("the fuse blew"));
      Fuse::blows = false;
      model.zero_grad();
      const Plant plant{module->first->bias, world() - 1, 9};
      plant.flip();
      optimizer->step(0.0625);
      plant.flip();
    } else {
      loss.backward();
      optimizer->step(0.0625);
    }
  }
}
