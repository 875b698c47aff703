// SPDX-License-Identifier: Apache-2.0
// Invalidated graphs and their re-captures.
#include "ddp/reduce/join.hpp"
#include "gpu/graph/graphed_step_test.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

struct LoopOptions {
  torch::Dtype dtype = torch::kFloat;
  bool freezes_first = false;
  OptimizerImplementation implementation = OptimizerImplementation::Auto;
};

/// A small network, trained eagerly or as a graph.
class Loop {
 public:
  using Step = GraphedStep<at::Tensor, at::Tensor>;

  explicit Loop(CudaGraph mode, const LoopOptions& options = {})
      : module_(make_module(options)),
        model_(module_, group()),
        optimizer_(make_optimizer(
            model_, OptimizerOptions{.momentum = 0.9, .implementation = options.implementation})),
        step_(make_step(mode)) {}

  /// Another step over the same model and optimizer.
  Step make_step(CudaGraph mode) {
    return Step(
        context(), {.models = {&model_}, .optimizers = {optimizer_.get()}},
        [this](const at::Tensor& batch, const StepScalars& scalars) {
          model_.zero_grad();
          auto loss = model_.forward(batch).to(torch::kFloat).square().mean();
          loss.backward();
          optimizer_->step(scalars);
          return loss;
        },
        GraphedStepOptions{.mode = mode});
  }

  void run(int num) { run(step_, num); }
  void run(Step& step, int num) {
    for (int i = 0; i < num; ++i, ++calls_) {
      const auto batch = batch_of(rank(), calls_, 4).to(module_->third->weight.scalar_type());
      result_ = step(batch, {.lr = 1e-5, .step = calls_}).outputs;
      losses_.push_back(result_.item<double>());
    }
  }

  Mlp& module() { return module_; }
  Optimizer& optimizer() { return *optimizer_; }
  void sync() { model_.sync_module_states(); }
  /// Runs `num` steps inside a join.
  void run_joined(int num) {
    join(model_, [&] { run(num); });
  }
  void recapture() { step_.recapture(); }
  GraphedStepCounts counts() const { return step_.counts(); }
  /// Result of the latest step, in the graph's own memory.
  const at::Tensor& result() const { return result_; }
  const std::vector<double>& losses() const { return losses_; }

 private:
  static Mlp make_module(const LoopOptions& options) {
    Mlp module;
    module->to(options.dtype);
    module->first->weight.set_requires_grad(!options.freezes_first);
    return module;
  }

  Mlp module_;
  DistributedDataParallel<Mlp> model_;
  std::unique_ptr<Optimizer> optimizer_;
  Step step_;
  at::Tensor result_;
  std::vector<double> losses_;
  int calls_ = 0;
};

void require_alike(Loop& graphed, Loop& eager) {
  REQUIRE(graphed.losses() == eager.losses());
  require_equal(graphed.module()->parameters(), eager.module()->parameters());
}

/// Moves the first weight to other memory and multiplies it by `factor`.
void move_first_weight(Loop& loop, double factor) {
  const torch::NoGradGuard no_grad;
  auto& weight = loop.module()->first->weight;
  weight.set_data(weight * factor);
}

StateDict copy_of(const StateDict& state) {
  StateDict copy = state;
  for (auto& [name, tensor] : copy.tensors) {
    tensor = tensor.clone();
  }
  return copy;
}

}  // namespace

TEST_CASE("a step whose graphs were all dropped is captured again") {
  const bool moves = GENERATE(false, true);
  CAPTURE(moves);
  Loop eager(CudaGraph::Off);
  Loop graphed(CudaGraph::On);
  int64_t first_replays = 0;  // fewer if several ranks first rebuild their buckets
  for (int round = 0; round < 3; ++round) {
    // The last tensor of its graph's pool outlives the graph.
    const auto kept = graphed.result();
    for (Loop* loop : {&eager, &graphed}) {
      loop->run(6);
    }
    REQUIRE(graphed.counts().captures == round + 1);
    if (round == 0) {
      first_replays = graphed.counts().replayed;
    } else {
      REQUIRE(kept.item<double>() == eager.losses()[static_cast<size_t>(6 * round - 1)]);
    }
    for (Loop* loop : {&eager, &graphed}) {
      moves ? move_first_weight(*loop, 1) : loop->recapture();
    }
  }
  REQUIRE(first_replays > 0);
  REQUIRE(graphed.counts().replayed == first_replays + 5 + 5);
  require_alike(graphed, eager);
}

TEST_CASE("a capture that failed leaves a pool that others capture in") {
  GraphedStep failing(context(), {}, [](const at::Tensor& batch, const StepScalars&) {
    const auto sum = batch.sum();
    sum.item<float>();
    return sum;
  });
  GraphedStep sharing(
      context(), {}, [](const at::Tensor& batch, const StepScalars&) { return batch.sum(); },
      GraphedStepOptions{.mode = CudaGraph::On}, failing.pool());
  const auto batch = torch::ones({4}, on_device());
  for (int i = 0; i < 6; ++i) {
    REQUIRE(failing(batch, {}).log[0] == 4);
  }
  REQUIRE_THAT(failing.counts().why_eager, Catch::Contains("waits for the device"));
  for (int i = 0; i < 6; ++i) {
    REQUIRE(sharing(batch, {}).log[0] == 4);
  }
  REQUIRE(sharing.counts().replayed == 3);
}

TEST_CASE("an optimizer's state that is loaded after a capture is what later steps work on") {
  const auto implementation =
      GENERATE(OptimizerImplementation::Flat, OptimizerImplementation::List);
  const LoopOptions options{.dtype = torch::kBFloat16, .implementation = implementation};
  Loop eager(CudaGraph::Off, options);
  Loop graphed(CudaGraph::On, options);
  for (Loop* loop : {&eager, &graphed}) {
    const auto fresh = copy_of(loop->optimizer().state_dict());
    REQUIRE(fresh.tensors.empty());
    loop->run(6);
    const auto trained = copy_of(loop->optimizer().state_dict());
    loop->run(4);
    loop->optimizer().load_state_dict(fresh);  // masters are made from the current weights
    loop->run(6);
    loop->optimizer().load_state_dict(trained);
    loop->run(6);
  }
  REQUIRE(graphed.counts().captures == 3);
  require_alike(graphed, eager);
}

/// Simulates a module that was moved, changed, and moved back to its old memory.
void change_first_weight_in_place(Loop& loop, double factor) {
  const torch::NoGradGuard no_grad;
  auto& weight = loop.module()->first->weight;
  weight.set_data(weight.detach().as_strided(weight.sizes(), weight.strides()));
  weight.mul_(factor);
}

TEST_CASE("a weight that comes back changed, to where it was, is what later replays work on") {
  const auto implementation =
      GENERATE(OptimizerImplementation::Flat, OptimizerImplementation::List);
  const LoopOptions options{.dtype = torch::kBFloat16, .implementation = implementation};
  Loop eager(CudaGraph::Off, options);
  Loop graphed(CudaGraph::On, options);
  for (Loop* loop : {&eager, &graphed}) {
    loop->run(8);
    change_first_weight_in_place(*loop, 2);
    const auto before = loop->counts().eager;
    loop->run(6);
    REQUIRE((loop == &eager || loop->counts().eager == before));
  }
  REQUIRE(graphed.counts().captures == 1);
  require_alike(graphed, eager);
}

TEST_CASE("weights that a kernel writes between replays are what later replays work on") {
  const auto implementation =
      GENERATE(OptimizerImplementation::Flat, OptimizerImplementation::List);
  const LoopOptions options{.dtype = torch::kBFloat16, .implementation = implementation};
  Loop eager(CudaGraph::Off, options);
  Loop graphed(CudaGraph::On, options);
  for (Loop* loop : {&eager, &graphed}) {
    loop->run(6);
    for (int i = 0; i < 3; ++i) {
      const auto& weight = loop->module()->first->weight;
      // An alias of the memory, unknown to the parameter.
      torch::from_blob(weight.data_ptr(), weight.sizes(), weight.strides(),
                       weight.options().requires_grad(false))
          .mul_(i == 1 ? 2 : 0.5);
      loop->run(2);
      const auto state = loop->optimizer().state_dict();
      REQUIRE(torch::equal(state.tensors.at("state.first.weight.master").to(torch::kBFloat16),
                           weight.detach()));
    }
  }
  REQUIRE(graphed.counts().captures == 1);
  require_alike(graphed, eager);
}

TEST_CASE("a step that was captured before a join is not replayed inside it") {
  // Ranks that ran out would wait for flags, which a replay does not send.
  Loop loop(CudaGraph::Auto);
  loop.run(8);
  REQUIRE(loop.counts().captures == 1);
  const auto before = loop.counts();
  loop.run_joined(rank() == 0 ? 3 : 2);
  REQUIRE(loop.counts().replayed == before.replayed);
  REQUIRE_THAT(loop.counts().why_eager, Catch::Contains("inside join()"));

  Loop strict(CudaGraph::On);
  strict.run(8);
  REQUIRE_THROWS_WITH(strict.run_joined(1), Catch::Contains("inside join()"));
}

TEST_CASE("a sync of weights restarts masters at once, and replays work on them") {
  const auto implementation =
      GENERATE(OptimizerImplementation::Flat, OptimizerImplementation::List);
  const LoopOptions options{.dtype = torch::kBFloat16, .implementation = implementation};
  Loop eager(CudaGraph::Off, options);
  Loop graphed(CudaGraph::On, options);
  for (Loop* loop : {&eager, &graphed}) {
    loop->run(8);
    loop->sync();
    for (const auto& [key, tensor] : loop->optimizer().state_dict().tensors) {
      INFO(key.text());
      REQUIRE((key.slot != "master" ||
               torch::equal(tensor, tensor.to(torch::kBFloat16).to(torch::kFloat))));
    }
    loop->run(6);
  }
  REQUIRE(graphed.counts().captures == 1);
  require_alike(graphed, eager);
}

TEST_CASE("a step whose optimizer followed a weight in another step is captured again") {
  Loop loop(CudaGraph::On,
            {.dtype = torch::kBFloat16, .implementation = OptimizerImplementation::Flat});
  auto other = loop.make_step(CudaGraph::On);
  for (int i = 0; i < 8; ++i) {
    loop.run(1);
    loop.run(other, 1);
  }
  REQUIRE(other.counts().captures == 1);
  const auto place = loop.module()->first->weight.detach();
  move_first_weight(loop, 1);
  loop.run(1);  // an eager step creates new tables
  loop.module()->first->weight.set_data(place);
  loop.run(1);         // and again
  loop.run(other, 2);  // its graph has the weight's address, but the first tables
  REQUIRE(other.counts().captures == 2);
}

TEST_CASE("a frozen parameter that moves is read where it is") {
  const LoopOptions options{.freezes_first = true};
  Loop eager(CudaGraph::Off, options);
  Loop graphed(CudaGraph::On, options);
  for (Loop* loop : {&eager, &graphed}) {
    loop->run(6);
    move_first_weight(*loop, 2);
    loop->run(6);
  }
  REQUIRE(graphed.counts().captures == 2);
  require_alike(graphed, eager);
}

TEST_CASE("kinds of batches that come once take no graph's place") {
  GraphedStep step(
      context(), {}, [](const at::Tensor& batch, const StepScalars&) { return batch.sum(); },
      GraphedStepOptions{.mode = CudaGraph::On, .max_graphs = 2});
  const auto run = [&](int64_t size, int num) {
    for (int i = 0; i < num; ++i) {
      REQUIRE(step(torch::ones({size}, on_device()), {}).log[0] == static_cast<double>(size));
    }
    return step.counts().captures;
  };
  for (int64_t size = 1; size <= 300; ++size) {  // more than the step remembers
    REQUIRE(run(size, 1) == 0);
  }
  REQUIRE(run(800, 5) == 1);
  REQUIRE(run(900, 3) == 2);
  REQUIRE(run(1000, 4) == 2);  // the limit is reached
  const auto replayed = step.counts().replayed;
  run(800, 1);
  run(900, 1);
  REQUIRE(step.counts().replayed == replayed + 2);
}

TEST_CASE("kinds of batches in a cycle longer than graphs are kept are captured") {
  GraphedStep step(
      context(), {}, [](const at::Tensor& batch, const StepScalars&) { return batch.sum(); },
      GraphedStepOptions{.mode = CudaGraph::On, .max_graphs = 2});
  for (int i = 0; i < 5 * 6; ++i) {
    const int64_t size = 1 + i % 5;
    REQUIRE(step(torch::ones({size}, on_device()), {}).log[0] == static_cast<double>(size));
  }
  REQUIRE(step.counts().captures == 2);
}

TEST_CASE("a kind of batch that comes again between many that do not is captured") {
  GraphedStep step(
      context(), {}, [](const at::Tensor& batch, const StepScalars&) { return batch.sum(); },
      GraphedStepOptions{.mode = CudaGraph::On, .max_graphs = 2});
  for (int64_t i = 0; i < 500; ++i) {
    const int64_t size = i % 100 == 0 ? 1 : 2 + i;  // many other sizes in between
    REQUIRE(step(torch::ones({size}, on_device()), {}).log[0] == static_cast<double>(size));
  }
  REQUIRE(step.counts().captures == 1);
}

TEST_CASE("a loss scale that is to grow otherwise does") {
  const Setup setup{.name = "growth",
                    .amp = {.dtype = AmpDtype::Fp16, .init_scale = 16.0, .growth_interval = 8}};
  for (const auto mode : {CudaGraph::Off, CudaGraph::On}) {
    Trainer trainer(setup, mode);
    const auto run = [&](int64_t from) {
      for (int64_t i = from; i < from + 8; ++i) {
        trainer.step(trainer.batches(i), i);
      }
      return trainer.counts().captures;
    };
    const auto captures = run(0);
    REQUIRE(trainer.loss_scale() == 32.0);
    trainer.scaler().set_growth_interval(2);
    trainer.scaler().set_growth_factor(4.0);
    REQUIRE(run(8) == captures + (mode == CudaGraph::On ? 1 : 0));
    REQUIRE(trainer.loss_scale() == 32.0 * 4 * 4 * 4 * 4);
  }
}
