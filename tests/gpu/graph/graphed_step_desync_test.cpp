// SPDX-License-Identifier: Apache-2.0
// ddp.desync_check_every beside captured steps: the replicas are compared between replays.
#include "gpu/graph/graphed_step_test.hpp"
#include "support/message_of.hpp"

using namespace ddp;
using namespace ddp::test;
using ::testing::message_of;

namespace {

constexpr int64_t kEvery = 4;

/// A GraphedStep of a small model with momentum, masters and averages.
struct CheckedTrainer {
  explicit CheckedTrainer(int64_t every, DesyncPolicy policy = DesyncPolicy::Error) {
    module->to(at::kBFloat16);
    DdpOptions options;
    options.desync_check_every = every;
    options.desync_policy = policy;
    model.emplace(module, group(), options);
    optimizer = make_optimizer(*model, {.momentum = 0.5});
    ema.emplace(*model);
    step.emplace(
        context(), GraphedParts{.models = {&*model}, .optimizers = {optimizer.get()}},
        [this](const at::Tensor& batch, const StepScalars& scalars) {
          model->zero_grad();
          const auto loss = model->forward(batch).square().mean();
          loss.backward();
          optimizer->step(scalars);
          ema->update();
          return loss.detach();
        },
        GraphedStepOptions{.mode = CudaGraph::Auto});
  }

  void run(int64_t i, int64_t size = 3) {
    (*step)(batch_of(rank(), i, 4, size).to(at::kBFloat16), {.lr = 1.0 / 64, .step = i});
  }

  /// Flips a bit on the last rank.
  static void flip(const at::Tensor& tensor) {
    if (rank() == world() - 1) {
      at::from_blob(tensor.data_ptr(), {1}, at::TensorOptions(at::kByte).device(tensor.device()))
          .bitwise_xor_(4);
    }
  }

  Mlp module;
  std::optional<DistributedDataParallel<Mlp>> model;
  std::unique_ptr<Optimizer> optimizer;
  std::optional<Ema> ema;
  std::optional<GraphedStep<at::Tensor, at::Tensor>> step;
};

}  // namespace

TEST_CASE("a bit that changes between replays is found at the next check and named") {
  CheckedTrainer trainer(kEvery);
  int64_t step = 0;
  for (; step < 11; ++step) {
    trainer.run(step);
  }
  REQUIRE(trainer.step->counts().replayed > 4);
  const auto state = trainer.optimizer->replicated_state().tensors;
  const std::vector<std::pair<std::string, at::Tensor>> all{
      {"parameter second.weight", trainer.module->second->weight},
      {"master of first.bias", state.at({"first.bias", "master"})},
      {"momentum_buffer of third.weight", state.at({"third.weight", "momentum_buffer"})},
      {"EMA of second.bias", trainer.ema->averages()[3].tensor}};
  for (const auto& [what, tensor] : all) {
    CheckedTrainer::flip(tensor);
    const auto message = message_of<MismatchError>([&] { trainer.run(step); });
    INFO(message);
    CHECK((message.find(what) != std::string::npos) == (world() > 1));
    CheckedTrainer::flip(tensor);
    for (int64_t i = 0; i < kEvery - 1; ++i) {  // up to the next check
      trainer.run(++step);
    }
    ++step;
  }
}

TEST_CASE("checks change no bit of a captured run, and ranks may capture at different steps") {
  const auto train = [](int64_t every) {
    CheckedTrainer trainer(every);
    for (int64_t i = 0; i < 30; ++i) {
      trainer.run(i, 1 + (i / 3 + rank()) % 3);  // other kinds of batches on each rank
    }
    std::vector<at::Tensor> all;
    for (const auto& parameter : trainer.module->parameters()) {
      all.push_back(parameter.detach().clone());
    }
    for (const auto& [key, tensor] : trainer.optimizer->state_dict().tensors) {
      all.push_back(tensor.clone());
    }
    CHECK(trainer.step->counts().replayed > 10);
    return all;
  };
  require_equal(train(1), train(0));
}

TEST_CASE("the majority repairs a rank between two replays") {
  if (world() < 3) {
    return;
  }
  CheckedTrainer trainer(1, DesyncPolicy::Repair);
  CheckedTrainer reference(0);
  for (int64_t i = 0; i < 16; ++i) {
    if (i > 8) {
      CheckedTrainer::flip(trainer.module->second->weight);
      CheckedTrainer::flip(
          trainer.optimizer->replicated_state().tensors.at({"first.bias", "master"}));
    }
    trainer.run(i);
    reference.run(i);
  }
  std::vector<at::Tensor> actual, expected;
  for (size_t i = 0; i < trainer.module->parameters().size(); ++i) {
    actual.push_back(trainer.module->parameters()[i].detach());
    expected.push_back(reference.module->parameters()[i].detach());
  }
  require_equal(actual, expected);
}
