// SPDX-License-Identifier: Apache-2.0
// What the trainers' loop does with optimizer.overlap_backward and with clipping.
#include <torch/torch.h>

#include "common/training_loop.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"

namespace {

using testing::message_of;

class LinearTask : public examples::TrainingTask {
 public:
  using Model = ddp::DistributedDataParallel<torch::nn::Linear>;
  explicit LinearTask(Model& model, bool sum = false) : model_(model), sum_(sum) {}

  int64_t num_batches() const override { return 2; }
  bool loss_is_sum() const override { return sum_; }
  examples::TrainingBatch load(int64_t draw) override {
    torch::manual_seed(static_cast<uint64_t>(draw));
    auto object = std::make_shared<torch::Tensor>(torch::randn({4, 3}));
    return {.object = object, .tensors = {object.get()}, .num_targets = 4, .num_samples = 4};
  }
  examples::MicroBatchResult forward(const examples::TrainingBatch& batch) override {
    const auto loss = model_.forward(*static_cast<torch::Tensor*>(batch.object.get())).square();
    return {sum_ ? loss.sum() : loss.mean(), torch::zeros({})};
  }
  void for_each_evaluation_batch(
      const std::function<void(examples::TrainingBatch)>& evaluate) override {
    evaluate(load(0));
  }
  examples::MicroBatchResult evaluate(const examples::TrainingBatch& batch) override {
    return forward(batch);
  }

 private:
  Model& model_;
  bool sum_;
};

// Passes everything on, and sees whether a begun step's weights changed before step().
class Spy : public ddp::Optimizer {
 public:
  explicit Spy(ddp::AnyOptimizer optimizer) : optimizer_(std::move(optimizer)) {}
  using Optimizer::step;
  void begin_step(const ddp::StepScalars& scalars) override {
    before_ = weight().clone();
    optimizer_.begin_step(scalars);
  }
  void step(const ddp::StepScalars& scalars) override {
    num_updated_in_backward += before_.defined() && !torch::equal(before_, weight()) ? 1 : 0;
    before_ = at::Tensor();
    clips = clips || scalars.clip_factor.defined();
    optimizer_.step(scalars);
  }
  ddp::GradientScan scan_gradients(const ddp::StepScalar& scale, double max_norm) override {
    return optimizer_.scan_gradients(scale, max_norm);
  }
  const ddp::NamedParameters& named_parameters() const override {
    return optimizer_.named_parameters();
  }
  bool supports_found_inf() const override { return true; }
  bool capturable() const override { return true; }
  ddp::StateDict state_dict() const override { return optimizer_.state_dict(); }
  void load_state_dict(const ddp::StateDict& state) override { optimizer_.load_state_dict(state); }

  int num_updated_in_backward = 0;
  bool clips = false;

 private:
  torch::Tensor weight() const { return named_parameters().front().tensor.detach(); }
  ddp::AnyOptimizer optimizer_;
  torch::Tensor before_;
};

struct Result {
  torch::Tensor weight;
  int num_updated_in_backward;
  bool clips;
};

struct Wanted {
  bool overlap = false;
  bool zero1 = false;
  double max_grad_norm = 0;
  bool sum = false;
  ddp::AmpOptions amp = {};
};

Result train(const Wanted& wanted) {
  ddp::ContextOptions context_options;
  context_options.device = "cpu";
  auto ctx = ddp::Context::create(context_options);
  torch::manual_seed(1);
  torch::nn::Linear module(3, 2);
  LinearTask::Model model(module, ctx.communicator());
  ddp::OptimizerOptions rule;
  rule.momentum = 0.9;
  rule.implementation = ddp::OptimizerImplementation::Flat;
  rule.overlap_backward = wanted.overlap;
  rule.zero1 = wanted.zero1;
  Spy optimizer(ddp::make_optimizer(model, rule));
  LinearTask task(model, wanted.sum);
  const ddp::LrSchedule lr_schedule(ddp::LrScheduleOptions{});
  ddp::GradScaler scaler(wanted.amp);
  ddp::MetricsOptions metrics_options;
  metrics_options.dir = "";
  ddp::Metrics metrics(ctx, metrics_options);
  examples::TrainingSettings settings;
  settings.train.grad_accum_steps = 2;
  settings.train.max_grad_norm = wanted.max_grad_norm;
  settings.amp = wanted.amp;
  settings.overlap_backward = wanted.overlap;
  settings.zero1 = wanted.zero1;
  settings.num_steps = 6;
  settings.log_every = 2;
  examples::TrainingLoop loop({.context = ctx,
                               .model = model,
                               .module = *module,
                               .task = task,
                               .optimizer = optimizer,
                               .lr_schedule = lr_schedule,
                               .scaler = scaler,
                               .metrics = metrics},
                              settings);
  ddp::Checkpointer checkpointer(ctx, {}, {model});
  loop.run(checkpointer, 0);
  return {module->weight.detach().clone(), optimizer.num_updated_in_backward, optimizer.clips};
}

}  // namespace

TEST_CASE("the loop begins steps before the last backward, and trains the same weights") {
  const auto plain = train({});
  CHECK(plain.num_updated_in_backward == 0);
  const auto overlapped = train({.overlap = true});
  CHECK(overlapped.num_updated_in_backward == 5);  // the first step makes the optimizer's state
  CHECK(torch::equal(overlapped.weight, plain.weight));
  // Gradients are there for the norm of every other step.
  const auto sharded = train({.overlap = true, .zero1 = true});
  CHECK(sharded.num_updated_in_backward == 2);
  CHECK(torch::equal(sharded.weight, plain.weight));
}

TEST_CASE("clipping leaves gradients to the step, and limits it") {
  const auto plain = train({});
  const auto loose = train({.max_grad_norm = 1e9});
  CHECK(loose.clips);
  CHECK(torch::equal(loose.weight, plain.weight));
  CHECK_FALSE(torch::equal(train({.max_grad_norm = 1e-3}).weight, plain.weight));
}

TEST_CASE("what must see all gradients first is refused with overlap_backward") {
  const auto refusal = [](const Wanted& wanted) {
    return message_of<ddp::SettingsError>([&] { train(wanted); });
  };
  CHECK_THAT(refusal({.overlap = true, .max_grad_norm = 0.5}),
             Catch::Contains("train.max_grad_norm=0.5") &&
                 Catch::Contains("set optimizer.overlap_backward=false"));
  ddp::AmpOptions fp16;
  fp16.grad_scaling = ddp::GradScaling::On;
  CHECK_THAT(refusal({.overlap = true, .amp = fp16}), Catch::Contains("loss scale"));
  CHECK_THAT(refusal({.overlap = true, .sum = true}), Catch::Contains("number of targets"));
}
