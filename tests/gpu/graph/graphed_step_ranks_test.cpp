// SPDX-License-Identifier: Apache-2.0
// Each rank captures, replays and runs eagerly by itself, and the gradients are those of ranks that
// all run eagerly.
#include "ddp/reduce/join.hpp"
#include "gpu/graph/graphed_step_test.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

/// A batch whose count is on the device, and a flag of the host that its graph has baked in.
using CountedBatch = std::tuple<at::Tensor, at::Tensor, bool>;

CountedBatch batch_of_size(int64_t step, int64_t size, bool doubles) {
  return {batch_of(rank(), step, 4, size), torch::full({}, static_cast<double>(size), on_device()),
          doubles};
}

struct Trained {
  std::vector<at::Tensor> weights;  // after each step
  GraphedStepCounts counts;
};

/// Trains a small model on batches that `make_batch(step)` gives. `refuses` ranks cannot capture.
template <typename MakeBatch>
Trained train(CudaGraph mode, int64_t num_steps, const MakeBatch& make_batch,
              const std::function<bool(int rank)>& refuses) {
  Mlp module;
  DistributedDataParallel model(module, group());
  OptimizerOptions rule;
  rule.type = OptimizerType::Sgd;
  const auto optimizer = make_optimizer(model, rule);
  GraphedStep step(
      context(), {.models = {&model}, .optimizers = {optimizer.get()}},
      [&](const CountedBatch& batch, const StepScalars& scalars) {
        const auto& [data, count, doubles] = batch;
        model.zero_grad();
        const auto loss = model.forward(data).sum() * (doubles ? 2 : 1);
        model.weighted_backward(loss, count);
        if (capturing() && refuses(rank())) {
          loss.nonzero();  // waits for the device
        }
        optimizer->step(scalars);
        return loss.detach();
      },
      GraphedStepOptions{.mode = mode});
  Trained trained;
  for (int64_t i = 0; i < num_steps; ++i) {
    step(make_batch(i), {.lr = 1.0 / 1024, .step = i});
    for (const auto& weight : module->parameters()) {
      trained.weights.push_back(weight.detach().clone());
    }
    if (i % 7 == 3) {  // as ranks do that ask for a stop, save or log
      context().control_plane().agree_any(false);
      group()->barrier();
    }
  }
  trained.counts = step.counts();
  return trained;
}

template <typename MakeBatch>
GraphedStepCounts require_eager_weights(
    int64_t num_steps, const MakeBatch& make_batch,
    const std::function<bool(int rank)>& refuses = [](int) { return false; }) {
  const auto graphed = train(CudaGraph::Auto, num_steps, make_batch, refuses);
  const auto eager = train(CudaGraph::Off, num_steps, make_batch, refuses);
  require_equal(graphed.weights, eager.weights);
  CHECK(eager.counts.eager == num_steps);
  CHECK(graphed.counts.eager + graphed.counts.replayed == num_steps);
  return graphed.counts;
}

}  // namespace

TEST_CASE("ranks whose batches differ in every step capture and replay by themselves") {
  // Every rank meets each of its kinds at other steps than the others do.
  const auto counts = require_eager_weights(80, [](int64_t step) {
    const auto kind = (step * (1 + rank()) + step / 7 + rank()) % 6;
    return batch_of_size(step, 1 + kind / 2, kind % 2 == 1);
  });
  CHECK(counts.captures == 6);
  CHECK(counts.replayed > 50);
}

TEST_CASE("one rank replays while another always meets something new") {
  const auto counts = require_eager_weights(
      40, [](int64_t step) { return batch_of_size(step, rank() == 0 ? 3 : 1 + step, false); });
  CHECK(counts.captures == (rank() == 0 ? 1 : 0));
}

TEST_CASE("a rank that cannot capture runs eagerly, and the others replay") {
  const auto counts = require_eager_weights(
      20, [](int64_t step) { return batch_of_size(step, 3, false); },
      [](int of_rank) { return of_rank == world() - 1; });
  CHECK((counts.replayed > 0) == (rank() != world() - 1));
  CHECK(counts.why_eager.empty() == (rank() != world() - 1));
}

// Whether a training forward begins with rank 0's buffers depends on the forward before it.
TEST_CASE("ranks in different modes agree about the buffers that rank 0 sends") {
  const bool fails = GENERATE(false, true);  // on the last rank, where it first synchronises
  const auto train_norm = [&](CudaGraph mode) {
    torch::nn::Sequential module(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
    const torch::NoGradGuard no_grad;
    for (auto& parameter : module->parameters()) {
      parameter.fill_(0.5);
    }
    const at::AutoGradMode grad(true);
    module->to(context().device());
    DistributedDataParallel model(module, group());
    GraphedStep step(
        context(), {.models = {&model}},
        [&](const at::Tensor& batch, const StepScalars&) {
          const auto loss = model.forward(batch).square().sum();
          loss.backward();
          if (fails && capturing() && rank() == world() - 1 && model.require_backward_grad_sync()) {
            loss.nonzero();  // waits for the device
          }
          return loss.detach();
        },
        GraphedStepOptions{.mode = mode});
    std::vector<at::Tensor> seen;
    for (int64_t i = 0; i < 40; ++i) {
      model.zero_grad();
      // Each rank has its own sizes, and each call is a micro-step of its own.
      const auto micro_step = [&](int64_t micro) {
        const auto size = 2 + (i + micro * rank()) % 3;
        step(batch_of(rank(), 3 * i + micro, 4, size), {.step = i});
      };
      {
        const auto no_sync = model.no_sync();
        micro_step(0);
      }
      micro_step(1);
      if (i == 20) {
        join(model, [&] { model.forward(batch_of(rank(), i, 4, 4)).sum().backward(); });
      }
      for (const auto& tensors : {module->buffers(), grads_of(*module)}) {
        for (const auto& tensor : tensors) {
          seen.push_back(tensor.detach().clone());
        }
      }
    }
    return std::pair(seen, step.counts());
  };
  const auto [graphed, counts] = train_norm(CudaGraph::Auto);
  require_equal(graphed, train_norm(CudaGraph::Off).first);
  CHECK((counts.replayed > 0 || (fails && rank() == world() - 1)));
}

TEST_CASE("a step that throws on all ranks is dropped, however many steps each rank replayed") {
  Mlp module, reference;
  DistributedDataParallel model(module, group());
  bool throws = false;
  GraphedStep step(
      context(), {.models = {&model}}, [&](const at::Tensor& batch, const StepScalars&) {
        model.zero_grad();
        const auto loss = model.forward(batch).sum();
        if (throws) {
          loss.register_hook([](const at::Tensor&) { throw std::runtime_error("half-way"); });
        }
        loss.backward();
        return loss.detach();
      });
  for (int64_t i = 0; i < 12; ++i) {
    step(batch_of(rank(), i, 4, rank() == 0 ? 3 : 3 + i), {.step = i});
  }
  CHECK((step.counts().replayed > 0) == (rank() == 0));
  throws = true;
  REQUIRE_THROWS_WITH(step(batch_of(rank(), 0, 4, 40), {.step = 12}), Catch::Contains("half-way"));
  throws = false;
  step(batch_of(rank(), 1, 4, 41), {.step = 13});
  require_equal(grads_of(*module), mean_reference(reference, [](Mlp& plain) {
                  return plain->forward(concatenated(1, 4, 41)).sum();
                }));
}

TEST_CASE("steps without collectives may differ in number between ranks") {
  GraphedStep step(
      context(), {}, [](const at::Tensor& batch, const StepScalars&) { return batch.sum(); },
      GraphedStepOptions{.mode = CudaGraph::On});
  for (int i = 0; i < 8 + rank(); ++i) {
    const auto data = torch::full({4 + rank() * (i % 2)}, 1.0F, on_device());
    REQUIRE(step(data, {.step = i}).log[0] == 4.0 + rank() * (i % 2));
  }
  REQUIRE(step.counts().captures == 1 + (rank() > 0 ? 1 : 0));
}
