// SPDX-License-Identifier: Apache-2.0
// The training loop with clipping and with train.non_finite.
#include <torch/torch.h>

#include <numeric>

#include "common/training_loop.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "unit/train/temporary_folder.hpp"

namespace {

using testing::message_of;

struct LinearBatch {
  torch::Tensor data;
  int64_t num_targets() const { return data.size(0); }
  int64_t num_samples() const { return data.size(0); }
};
void for_each_tensor(LinearBatch& batch, const ddp::TensorVisitor& visit) {
  visit(batch.data);
}

class LinearTask : public examples::TrainingTask<LinearBatch> {
 public:
  using Model = ddp::DistributedDataParallel<torch::nn::Linear>;
  using Spoil = std::function<torch::Tensor(int64_t forward, const torch::Tensor& loss)>;
  /// An epoch is one step, of micro-batches with these numbers of rows.
  explicit LinearTask(Model& model, std::vector<int64_t> rows, bool sum = false, Spoil spoil = {})
      : model_(model), rows_(std::move(rows)), sum_(sum), spoil_(std::move(spoil)) {}

  int64_t num_batches() const override { return static_cast<int64_t>(rows_.size()); }
  bool loss_is_sum() const override { return sum_; }
  /// Every division of an epoch into micro-batches has the same rows.
  LinearBatch load(int64_t draw) override {
    const auto part = draw % num_batches();
    torch::manual_seed(static_cast<uint64_t>(draw / num_batches()));
    const auto all = torch::randn({std::accumulate(rows_.begin(), rows_.end(), int64_t{0}), 3});
    return {.data = all.narrow(0, std::accumulate(rows_.begin(), rows_.begin() + part, int64_t{0}),
                               rows_[static_cast<std::size_t>(part)])};
  }
  examples::BatchResult forward(const LinearBatch& batch) override {
    auto loss = loss_of(batch);
    loss = spoil_ ? spoil_(num_forwards_, loss) : loss;
    ++num_forwards_;
    return result_of(batch, loss);
  }
  void for_each_evaluation_batch(const std::function<bool(LinearBatch)>& evaluate) override {
    for (int64_t i = 0; i < 3 && evaluate(load(i)); ++i) {
    }
  }
  examples::BatchResult evaluate(const LinearBatch& batch) override {
    if (before_evaluation_batch) {
      before_evaluation_batch();
    }
    return result_of(batch, loss_of(batch));
  }

  std::function<void()> before_evaluation_batch = {};

 private:
  torch::Tensor loss_of(const LinearBatch& batch) {
    const auto loss = model_.forward(batch.data).square();
    return sum_ ? loss.sum() : loss.mean();
  }
  static examples::BatchResult result_of(const LinearBatch& batch, const torch::Tensor& loss) {
    return {.loss = loss,
            .num_correct = torch::zeros({}),
            .num_targets = {.on_host = batch.num_targets()}};
  }
  Model& model_;
  std::vector<int64_t> rows_;
  bool sum_;
  Spoil spoil_;
  int64_t num_forwards_ = 0;  // training forwards
};

// Forwards all calls, and records the weights after each step.
class Spy : public ddp::Optimizer {
 public:
  explicit Spy(std::unique_ptr<ddp::Optimizer> optimizer) : optimizer_(std::move(optimizer)) {}
  using Optimizer::step;
  void step(const ddp::StepScalars& scalars) override {
    clips = clips || scalars.clip_factor.defined();
    optimizer_->step(scalars);
    weights.push_back(weight().clone());
  }
  ddp::GradientScan scan_gradients(const ddp::StepScalar& scale, double max_norm) override {
    return optimizer_->scan_gradients(scale, max_norm);
  }
  const ddp::NamedParameters& named_parameters() const override {
    return optimizer_->named_parameters();
  }
  bool supports_found_inf() const override { return true; }
  bool capturable() const override { return true; }
  ddp::StateDict state_dict() const override { return optimizer_->state_dict(); }
  void load_state_dict(const ddp::StateDict& state) override { optimizer_->load_state_dict(state); }

  bool clips = false;
  std::vector<torch::Tensor> weights;  // after each step

 private:
  torch::Tensor weight() const { return named_parameters().front().tensor.detach(); }
  std::unique_ptr<ddp::Optimizer> optimizer_;
};

struct Result {
  torch::Tensor weight;
  bool clips;
  std::vector<torch::Tensor> weights;
  examples::TrainingSummary summary;
};

struct Wanted {
  bool zero1 = false;
  double max_grad_norm = 0;
  bool sum = false;
  ddp::AmpOptions amp = {};
  ddp::NonFinite non_finite = ddp::NonFinite::Error;
  double lr = 0.1;
  int64_t num_steps = 6;
  std::vector<int64_t> rows = {4, 4};  ///< of the micro-batches of a step
  int64_t eval_every_steps = 0;
  ddp::CheckpointOptions checkpoint = {};
  std::string metrics_dir = "";
  std::function<void()> before_evaluation_batch = {};
  std::function<void(int64_t steps_done, const examples::EvalResult&)> on_evaluation = {};
  // The third argument is the module's bias.
  std::function<torch::Tensor(int64_t forward, const torch::Tensor& loss, const torch::Tensor&)>
      spoil = {};
};

Result train(const Wanted& wanted) {
  ddp::ContextOptions context_options;
  context_options.device = ddp::DeviceChoice::Cpu;
  auto ctx = ddp::Context::create(context_options);
  torch::manual_seed(1);
  torch::nn::Linear module(3, 2);
  LinearTask::Model model(module, ctx.communicator());
  ddp::OptimizerOptions rule;
  rule.momentum = 0.9;
  rule.implementation = ddp::OptimizerImplementation::Flat;
  rule.zero1 = wanted.zero1;
  Spy optimizer(ddp::make_optimizer(model, rule));
  LinearTask::Spoil spoil;
  if (wanted.spoil) {
    spoil = [&](int64_t forward, const torch::Tensor& loss) {
      return wanted.spoil(forward, loss, module->bias);
    };
  }
  LinearTask task(model, wanted.rows, wanted.sum, spoil);
  ddp::LrScheduleOptions rate;
  rate.lr = wanted.lr;
  const ddp::LrSchedule lr_schedule(rate);
  ddp::GradScaler scaler(wanted.amp);
  ddp::MetricsOptions metrics_options;
  metrics_options.dir = wanted.metrics_dir;
  metrics_options.run_name = "run";
  ddp::Metrics metrics(ctx, metrics_options);
  examples::TrainingSettings settings;
  settings.train.grad_accum_steps = static_cast<int64_t>(wanted.rows.size());
  settings.train.max_grad_norm = wanted.max_grad_norm;
  settings.train.non_finite = wanted.non_finite;
  settings.amp = wanted.amp;
  settings.num_steps = wanted.num_steps;
  settings.log_every = 2;
  settings.stop_check_seconds = 0;
  settings.keep_best = wanted.checkpoint.keep_best;
  settings.train.eval_every_steps = wanted.eval_every_steps;
  task.before_evaluation_batch = wanted.before_evaluation_batch;
  examples::TrainingLoop loop(task,
                              {.context = ctx,
                               .model = model,
                               .module = *module,
                               .optimizer = optimizer,
                               .lr_schedule = lr_schedule,
                               .scaler = scaler,
                               .metrics = metrics,
                               .on_evaluation = wanted.on_evaluation},
                              settings);
  ddp::Checkpointer checkpointer(ctx, wanted.checkpoint, {model, optimizer});
  const auto first_step = checkpointer.restore();
  auto summary = loop.run(checkpointer, first_step);
  return {module->weight.detach().clone(), optimizer.clips, optimizer.weights, summary};
}

// With two forwards per step: the first forward of the third and of the fourth step.
constexpr int64_t kUnlogged = 4;
constexpr int64_t kLogged = 6;

// Makes the bias's gradient NaN in that forward; the loss is unchanged.
auto bad_gradient(int64_t bad) {
  return [bad](int64_t forward, const torch::Tensor& loss, const torch::Tensor& bias) {
    return forward == bad ? loss + (bias * 0).square().sum().sqrt() : loss;
  };
}

// Makes the loss inf in that forward; its gradients are unchanged.
auto bad_loss(int64_t bad) {
  return [bad](int64_t forward, const torch::Tensor& loss, const torch::Tensor&) {
    return forward == bad ? loss + std::numeric_limits<float>::infinity() : loss;
  };
}

std::string end_of(const Wanted& wanted) {
  return message_of<ddp::NonFiniteError>([&] { train(wanted); });
}

}  // namespace

TEST_CASE("steps with and without a gradient norm are different kinds of steps") {
  const auto kind_of = [](bool wants_grad_norm) {
    examples::StepInput<LinearBatch> input{.batches = {{torch::ones({4, 3})}},
                                           .wants_grad_norm = wants_grad_norm};
    std::vector<int64_t> numbers;
    for_each_tensor(
        input, ddp::TensorVisitor([](torch::Tensor&) {}, [&](int64_t n) { numbers.push_back(n); }));
    return numbers;
  };
  CHECK(kind_of(true) == kind_of(true));
  CHECK(kind_of(true) != kind_of(false));
}

TEST_CASE("a step is that of its samples, however they are cut into micro-batches") {
  const bool sum = GENERATE(false, true);
  const auto rows = GENERATE(std::vector<int64_t>{6, 2}, std::vector<int64_t>{8, 2},
                             std::vector<int64_t>{3, 3, 1}, std::vector<int64_t>{4, 4});
  const auto total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  CAPTURE(sum, rows);
  const auto whole = train({.sum = sum, .rows = {total}});
  const auto parts = train({.sum = sum, .rows = rows});
  // Sums in another order: a few roundings of float32 in each of six steps.
  CHECK(torch::allclose(parts.weight, whole.weight, 1e-5, 1e-6));
  CHECK(*parts.summary.first_epoch->train_loss ==
        Approx(*whole.summary.first_epoch->train_loss).epsilon(1e-6));
  CHECK(*parts.summary.last_epoch.train_loss ==
        Approx(*whole.summary.last_epoch.train_loss).epsilon(1e-5));
}

TEST_CASE("a sharded optimizer trains the same weights") {
  CHECK(torch::equal(train({.zero1 = true}).weight, train({}).weight));
}

TEST_CASE("clipping leaves gradients to the step, and limits it") {
  const auto plain = train({});
  const auto loose = train({.max_grad_norm = 1e9});
  CHECK(loose.clips);
  CHECK(torch::equal(loose.weight, plain.weight));
  CHECK_FALSE(torch::equal(train({.max_grad_norm = 1e-3}).weight, plain.weight));
}

TEST_CASE("a run that is not finite ends with the step, the parameter and the rank") {
  CHECK_THAT(end_of({.spoil = bad_gradient(kLogged)}),
             Catch::Contains("step 4 is not finite (train.non_finite=error): the first gradient "
                             "with inf or NaN is that of bias; the losses of all 1 ranks are "
                             "finite (reported by rank 0); fix: a lower lr_schedule.lr"));
  CHECK_THAT(end_of({.max_grad_norm = 1.0, .spoil = bad_gradient(kUnlogged)}),
             Catch::Contains("step 3 is not finite"));
  // Gradients are checked only in logged steps, losses in all: NaN shows in the next loss.
  CHECK_THAT(
      end_of({.num_steps = 5, .spoil = bad_gradient(0)}),
      Catch::Contains("step 2 is not finite") && Catch::Contains("the loss of rank 0 is nan"));
  CHECK_THAT(end_of({.spoil = bad_loss(kUnlogged)}),
             Catch::Contains("step 3 is not finite (train.non_finite=error): the loss of rank 0 is "
                             "inf; all weights are finite"));
  CHECK_THAT(end_of({.sum = true, .spoil = bad_loss(kUnlogged)}),
             Catch::Contains("step 3 is not finite"));
  try {
    train({.spoil = bad_loss(0)});
    FAIL("no exception");
  } catch (const ddp::Error& error) {
    CHECK(static_cast<int>(error.exit_code()) == 70);
  }
}

TEST_CASE("a last update that leaves weights that are not finite ends the run too") {
  const auto large = [](int64_t, const torch::Tensor& loss, const torch::Tensor&) {
    return loss * 1e4;
  };
  CHECK_THAT(end_of({.lr = 3e38, .num_steps = 1, .spoil = large}),
             Catch::Contains("the weights are not finite after the last step") &&
                 Catch::Contains("the first with inf or NaN is weight, on rank 0"));
}

TEST_CASE("an update that is not finite is dropped, and training continues") {
  const bool zero1 = GENERATE(false, true);
  const auto plain = train({.zero1 = zero1});
  const auto skip = ddp::NonFinite::Skip;
  const auto same = train({.zero1 = zero1, .non_finite = skip});
  CHECK(torch::equal(same.weight, plain.weight));
  const auto by_gradient =
      train({.zero1 = zero1, .non_finite = skip, .spoil = bad_gradient(kUnlogged)});
  REQUIRE(by_gradient.weights.size() == 6);
  CHECK(torch::equal(by_gradient.weights[1], plain.weights[1]));
  CHECK(torch::equal(by_gradient.weights[2], by_gradient.weights[1]));
  CHECK_FALSE(torch::equal(by_gradient.weights[3], by_gradient.weights[2]));
  CHECK(torch::isfinite(by_gradient.weight).all().item<bool>());
  for (const bool sum : {false, true}) {
    const auto by_loss =
        train({.zero1 = zero1, .sum = sum, .non_finite = skip, .spoil = bad_loss(kUnlogged)});
    CHECK(torch::equal(by_loss.weights[2], by_loss.weights[1]));
    CHECK_FALSE(torch::equal(by_loss.weights[3], by_loss.weights[2]));
    CHECK((sum || torch::equal(by_loss.weight, by_gradient.weight)));
  }
}

TEST_CASE("with train.non_finite=ignore training continues with such weights") {
  const auto result =
      train({.non_finite = ddp::NonFinite::Ignore, .spoil = bad_gradient(kUnlogged)});
  CHECK(torch::isnan(result.weight).any().item<bool>());
}

TEST_CASE("a step that the loss scaler skips is not an error") {
  Wanted wanted;
  wanted.amp.grad_scaling = ddp::GradScaling::On;
  wanted.spoil = bad_gradient(kLogged);
  const auto result = train(wanted);
  CHECK(torch::equal(result.weights[3], result.weights[2]));
  CHECK(torch::isfinite(result.weight).all().item<bool>());
  wanted.spoil = bad_loss(kLogged);
  CHECK_THAT(end_of(wanted), Catch::Contains("step 4 is not finite") &&
                                 Catch::Contains("the loss of rank 0 is inf"));
}

TEST_CASE("a stop in an evaluation saves the last step; the next start repeats the evaluation") {
  // Evaluations after steps 2, 4 and 6, each an epoch's end; 6 is the run's last step.
  const int64_t stopped_after = GENERATE(2, 6);
  CAPTURE(stopped_after);
  testing::TemporaryFolder folder;
  std::vector<std::pair<int64_t, double>> evaluated;
  Wanted wanted;
  wanted.eval_every_steps = 2;
  wanted.on_evaluation = [&](int64_t steps_done, const examples::EvalResult& result) {
    evaluated.emplace_back(steps_done, result.loss);
  };
  const auto whole = train(wanted);
  const auto all = std::exchange(evaluated, {});
  REQUIRE(all.size() == 3);

  wanted.checkpoint.dir = folder.file("checkpoints");
  wanted.checkpoint.keep_best = ddp::KeepBest::Min;
  wanted.checkpoint.keep_last = 10;
  wanted.metrics_dir = folder.file("runs");
  int64_t num_batches = 0;
  wanted.before_evaluation_batch = [&] {
    if (++num_batches == 3 * (stopped_after / 2 - 1) + 2) {  // the second batch of three
      ddp::request_stop();
    }
  };
  CHECK_THAT(message_of<ddp::Stop>([&] { train(wanted); }),
             Catch::Contains(ddp::concat("rank 0 was asked to stop: stopped after ", stopped_after,
                                         " steps, saved in ")));
  ddp::clear_stop_request();
  CHECK(num_batches == 3 * (stopped_after / 2 - 1) + 2);  // not the third
  CHECK(evaluated.size() == all.size() - (stopped_after == 2 ? 3 : 1));
  const auto epochs = testing::read_file(folder.file("runs/run/epochs.csv"));
  CHECK(std::count(epochs.begin(), epochs.end(), '\n') == 1 + stopped_after);

  wanted.before_evaluation_batch = {};
  const auto resumed = train(wanted);
  CHECK(evaluated == all);
  CHECK(torch::equal(resumed.weight, whole.weight));
  CHECK(resumed.summary.test.loss == all.back().second);
  const auto evals = testing::read_file(folder.file("runs/run/evals.csv"));
  CHECK(std::count(evals.begin(), evals.end(), '\n') == 1 + 3);
}
