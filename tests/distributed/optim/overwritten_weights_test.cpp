// SPDX-License-Identifier: Apache-2.0
// Weights that other code than their optimizer wrote: the float32 masters follow them, and nobody
// has to be told.
#include "ddp/reduce/join.hpp"
#include "ddp/train/weights.hpp"
#include "distributed/optim/zero_test_utils.hpp"
#include "support/stderr_of.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

// A list optimizer, a flat one, and a flat one in parts.
OptimizerOptions any_rule(int kind) {
  OptimizerOptions options = rule(OptimizerType::Sgd, kind == 2);
  options.implementation =
      kind == 0 ? OptimizerImplementation::List : OptimizerImplementation::Flat;
  return options;
}

void require_equal_on_all_ranks(const StateDict& state) {
  for (const auto& [key, tensor] : state.tensors) {
    INFO(key);
    const auto mine = tensor.to(on_device().device()).contiguous().view({-1});
    auto all = torch::empty({world() * mine.numel()}, mine.options());
    group()->all_gather(all, mine)->wait();
    REQUIRE(torch::equal(all.narrow(0, 0, mine.numel()), mine));
  }
}

StateDict masters_of(const Trainer& trainer) {
  StateDict state = copy_of(trainer.optimizer->state_dict());
  std::erase_if(state.tensors, [](const auto& item) { return item.first.slot != "master"; });
  REQUIRE(state.tensors.size() == trainer.module->weights.size());
  return state;
}

}  // namespace

TEST_CASE("loaded weights are not undone by the next step") {
  const int kind = GENERATE(0, 1, 2);
  const bool by_module = GENERATE(false, true);
  CAPTURE(kind, by_module);
  Trainer trainer(any_rule(kind), {}, torch::kBFloat16);
  StateDict saved;
  for (int step = 0; step < 6; ++step) {
    trainer.train(step);
    if (step == 2) {
      saved = copy_of(trainer.model.state_dict());
    }
  }
  if (by_module) {
    TensorMap weights;
    for (const auto& [key, tensor] : saved.tensors) {
      weights.emplace(key.text(), tensor);
    }
    load_weights(*trainer.module, weights, "a test", /*strict=*/true);
  } else {
    trainer.model.load_state_dict(saved);
  }
  trainer.model.zero_grad();
  trainer.backward(6);
  trainer.optimizer->step(0.0);
  for (const auto& [name, tensor] : trainer.model.state_dict().tensors) {
    INFO(name);
    REQUIRE(torch::equal(tensor, saved.tensors.at(name)));
  }
}

TEST_CASE("masters keep their bits where the weights that are loaded are theirs") {
  const int kind = GENERATE(0, 1, 2);
  CAPTURE(kind);
  Trainer trainer(any_rule(kind), {}, torch::kBFloat16);
  for (int step = 0; step < 4; ++step) {
    trainer.train(step);
  }
  const StateDict before = masters_of(trainer);
  trainer.model.load_state_dict(copy_of(trainer.model.state_dict()));
  require_same_state(masters_of(trainer), before);
  if (kind != 2) {
    join(trainer.model, [] {});
    require_same_state(masters_of(trainer), before);
    return;
  }
  trainer.model.sync_module_states();  // each master is on one rank only
  require_same_state(masters_of(trainer), before);
}

TEST_CASE("weights written between steps, past LibTorch, are what every optimizer goes on from") {
  Trainer list(any_rule(0), {}, torch::kBFloat16);
  Trainer flat(any_rule(1), {}, torch::kBFloat16);
  Trainer sharded(any_rule(2), {}, torch::kBFloat16);
  for (int step = 0; step < 6; ++step) {
    CAPTURE(step);
    for (Trainer* trainer : {&list, &flat, &sharded}) {
      trainer->train(step);
      const torch::NoGradGuard no_grad;
      auto& weight = trainer->module->weights[static_cast<size_t>(step)];
      const auto memory = torch::from_blob(weight.data_ptr(), weight.sizes(), weight.strides(),
                                           weight.options().requires_grad(false));
      memory.mul_(torch::where(integers(weight.sizes().vec(), step) > 0, 2, 1));
    }
    if (step % 2 == 1) {  // a state saved before the next step has the new values, too
      require_same_state(sharded.optimizer->state_dict(), flat.optimizer->state_dict());
    }
    REQUIRE(torch::equal(
        flat.optimizer->state_dict().tensors.at("state.w0.master").to(torch::kBFloat16),
        flat.module->weights[0].detach()));
  }
  for (Trainer* trainer : {&list, &flat, &sharded}) {
    const StateDict written = copy_of(trainer->model.state_dict());
    trainer->model.zero_grad();
    trainer->backward(6);
    trainer->optimizer->step(0.0);
    require_same_state(trainer->model.state_dict(), written);
  }
  require_same_weights(sharded.module, flat.module);
}

TEST_CASE("ranks that trained apart have the same masters after sync_module_states") {
  const int kind = GENERATE(0, 1);
  const bool saves_first = GENERATE(false, true);
  CAPTURE(kind, saves_first);
  Trainer trainer(any_rule(kind), {}, torch::kBFloat16);
  trainer.train(0);
  {
    const auto alone = trainer.model.no_sync();
    trainer.model.zero_grad();
    trainer.backward(1);
    trainer.optimizer->step(0x1p-20);  // moves masters, but hardly a weight
  }
  trainer.model.sync_module_states();
  if (!saves_first) {
    trainer.model.zero_grad();
    trainer.backward(2);
    trainer.optimizer->step(0.0);
  }
  require_equal_on_all_ranks(masters_of(trainer));
  // A state that is loaded after that keeps its bits.
  StateDict loaded = copy_of(trainer.optimizer->state_dict());
  for (auto& [key, tensor] : loaded.tensors) {
    if (key.slot == "master") {
      tensor.mul_(1 + 0x1p-20);
    }
  }
  trainer.model.sync_module_states();
  trainer.optimizer->load_state_dict(loaded);
  require_same_state(trainer.optimizer->state_dict(), loaded);
}

TEST_CASE("a sync resets the masters of all optimizers of the model that still exist") {
  const int kind = GENERATE(0, 1);
  CAPTURE(kind);
  Trainer trainer(any_rule(kind), {}, torch::kBFloat16);
  trainer.train(0);
  { const auto gone = make_optimizer(trainer.model, any_rule(kind)); }
  const auto second = make_optimizer(trainer.model, any_rule(kind));
  second->load_state_dict(copy_of(trainer.optimizer->state_dict()));
  const auto num_equal_to_weights = [](const Optimizer& optimizer) {
    const auto state = optimizer.state_dict();
    return std::count_if(state.tensors.begin(), state.tensors.end(), [](const auto& item) {
      return item.first.slot == "master" &&
             torch::equal(item.second, item.second.to(torch::kBFloat16).to(torch::kFloat));
    });
  };
  for (const auto* optimizer : {trainer.optimizer.get(), second.get()}) {
    REQUIRE(num_equal_to_weights(*optimizer) < std::ssize(trainer.module->weights));
  }
  trainer.model.sync_module_states();
  for (const auto* optimizer : {trainer.optimizer.get(), second.get()}) {
    REQUIRE(num_equal_to_weights(*optimizer) == std::ssize(trainer.module->weights));
  }
}

TEST_CASE("after a join all ranks go on from the weights of the one that was active last") {
  const int kind = GENERATE(0, 1);
  CAPTURE(kind);
  Trainer trainer(any_rule(kind), {}, torch::kBFloat16);
  trainer.train(0);
  trainer.train(1);
  const std::string log = testing::stderr_of([&] {
    join(trainer.model, [&] {
      for (int step = 2; step < (rank() == 0 ? 5 : 2); ++step) {
        trainer.train(step);
      }
    });
  });
  // Momentum is each rank's own. A process says so once.
  CHECK(testing::num_found(log, "missed their optimizer steps") == (rank() != 0 && kind == 0));
  const StateDict sent = copy_of(trainer.model.state_dict());
  require_equal_on_all_ranks(sent);
  require_equal_on_all_ranks(masters_of(trainer));
  trainer.model.zero_grad();
  trainer.backward(5);
  trainer.optimizer->step(0.0);
  require_same_state(trainer.model.state_dict(), sent);
}
