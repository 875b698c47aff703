// SPDX-License-Identifier: Apache-2.0
// train.replay_check_every: a step that runs twice on one device gives the same gradients, a bit
// that changes on the way is found, and the check leaves no trace in the run. tests/gpu/graph has
// captured steps.
#include <optional>

#include "ddp/amp/amp.hpp"
#include "ddp/optim/ema.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/train/graphed_step.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "support/message_of.hpp"
#include "support/stderr_of.hpp"

using namespace ddp;
using namespace ddp::test;
using ::testing::message_of;

namespace {

/// Flips bit 7 of the first number, a float.
void flip(const at::Tensor& tensor) {
  at::from_blob(tensor.data_ptr(), {1}, at::TensorOptions(at::kByte).device(tensor.device()))
      .bitwise_xor_(128);
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    using namespace torch::nn;
    first = register_module("first", Linear(4, 16));
    norm = register_module("norm", BatchNorm1d(16));
    dropout = register_module("dropout", Dropout(0.4));
    last = register_module("last", Linear(16, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto hidden = first(x);
    if (spoils_activation) {
      flip(hidden);
    }
    const auto y = last(dropout(torch::relu(norm(hidden)))) * factor;
    if (spoils_gradient) {
      y.register_hook([](const at::Tensor& gradient) {
        const auto changed = gradient.clone();
        flip(changed);
        return changed;
      });
    }
    return y;
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
  bool spoils_activation = false;
  bool spoils_gradient = false;
  double factor = 1;
};
TORCH_MODULE(Net);

struct Setup {
  std::string name;
  DdpOptions ddp = {};
  OptimizerOptions optimizer = {.momentum = 0.5};
  AmpOptions amp = {};
  int64_t micro_batches = 1;
  bool weighted = false;
  bool zeroes_outside = false;
  bool zeroes_never = false;  ///< gradients add up from step to step
  bool clips = false;
};

/// A training step with all that it may change.
struct Trainer {
  Trainer(const Setup& with, int64_t every) : setup(with) {
    torch::manual_seed(5);
    module = Net();
    module->to(context().device());
    model.emplace(module, group(), setup.ddp);
    optimizer = make_optimizer(*model, setup.optimizer);
    scaler.emplace(setup.amp);
    ema.emplace(*model, EmaOptions{.decay = 0.9});
    torch::manual_seed(static_cast<uint64_t>(11 + rank()));
    step.emplace(
        context(),
        GraphedParts{.models = {&*model}, .optimizers = {optimizer.get()}, .scaler = &*scaler},
        [this](const std::vector<at::Tensor>& batches, const StepScalars& scalars) {
          return run_lambda(batches, scalars);
        },
        GraphedStepOptions{.mode = CudaGraph::Off, .replay_check_every = every});
  }

  at::Tensor run_lambda(const std::vector<at::Tensor>& batches, const StepScalars& scalars) {
    ++num_calls;
    module->spoils_activation = spoils_activation_in == num_calls;
    module->spoils_gradient = spoils_gradient_in == num_calls;
    module->factor = is_irregular ? 1.0 + static_cast<double>(num_calls) / 1024 : 1.0;
    if (!setup.zeroes_outside && !setup.zeroes_never) {
      model->zero_grad();
    }
    at::Tensor sum;
    for (size_t micro = 0; micro < batches.size(); ++micro) {
      std::optional<NoSync> no_sync;
      if (micro + 1 < batches.size()) {
        no_sync.emplace(*model);
      }
      const auto loss = model->forward(batches[micro]).square().mean();
      if (setup.weighted) {
        model->weighted_backward(scaler->scale(loss), static_cast<double>(rank() + 1));
      } else {
        scaler->scale(loss).backward();
      }
      sum = loss.detach();
    }
    if (setup.clips) {
      scaler->clip_and_step(*optimizer, scalars, 0.5);
    } else {
      scaler->step(*optimizer, scalars);
    }
    scaler->update();
    ema->update();
    return sum;
  }

  void run(int64_t i) {
    if (setup.zeroes_outside) {
      model->zero_grad();
    }
    std::vector<at::Tensor> batches;
    for (int64_t micro = 0; micro < setup.micro_batches; ++micro) {
      batches.push_back(batch_of(rank(), 10 * i + micro, 4, 6));
    }
    (*step)(batches, {.lr = 0.0625, .step = i});
  }

  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> all;
    for (const auto& parameter : module->parameters()) {
      all.push_back(parameter.detach().clone());
      all.push_back(parameter.grad());
    }
    for (const auto& buffer : module->buffers()) {
      all.push_back(buffer.clone());
    }
    const auto state = optimizer->state_dict();
    for (const auto& [key, tensor] : state.tensors) {
      all.push_back(tensor.clone());
    }
    for (const auto& [key, parts] : state.parts) {
      for (const auto& part : parts) {
        all.push_back(part.tensor.clone());
      }
    }
    for (const auto& average : ema->averages()) {
      all.push_back(average.tensor.clone());
    }
    all.push_back(torch::rand({4}, on_device()));  // shows the generators' states
    all.push_back(torch::rand({4}));
    all.push_back(torch::tensor(scaler->get_scale()));
    return all;
  }

  const Setup setup;
  Net module{nullptr};
  std::optional<DistributedDataParallel<Net>> model;
  std::unique_ptr<Optimizer> optimizer;
  std::optional<GradScaler> scaler;
  std::optional<Ema> ema;
  std::optional<GraphedStep<std::vector<at::Tensor>, at::Tensor>> step;
  int64_t num_calls = 0;  // of the lambda
  int64_t spoils_activation_in = -1;
  int64_t spoils_gradient_in = -1;
  bool is_irregular = false;
};

std::vector<Setup> setups() {
  const auto with = [](std::string name, const auto& change) {
    Setup setup{.name = std::move(name)};
    setup.ddp.bucket_cap_mb = 100.0 / (1 << 20);
    change(setup);
    return setup;
  };
  return {
      with("plain", [](Setup&) {}),
      with("micro-batches", [](Setup& s) { s.micro_batches = 3; }),
      with("weighted", [](Setup& s) { s.weighted = true, s.micro_batches = 2; }),
      with("gradients that are zeroed outside", [](Setup& s) { s.zeroes_outside = true; }),
      with("gradients that are never zeroed", [](Setup& s) { s.zeroes_never = true; }),
      with("a loss scale and clipping",
           [](Setup& s) {
             s.amp.grad_scaling = GradScaling::On;
             s.amp.growth_interval = 2;
             s.clips = true;
           }),
      with("AdamW",
           [](Setup& s) { s.optimizer = {.type = OptimizerType::AdamW, .weight_decay = 0.125}; }),
      with("ZeRO-1", [](Setup& s) { s.optimizer.zero1 = true, s.clips = true; }),
      with("unused parameters", [](Setup& s) { s.ddp.find_unused_parameters = true; }),
      with("a static graph", [](Setup& s) { s.ddp.static_graph = true; }),
      with("a hook", [](Setup& s) { s.ddp.comm_hook = CommHookType::Bf16Compress; }),
      with("PowerSGD",
           [](Setup& s) {
             s.ddp.comm_hook = CommHookType::PowerSgd;
             s.ddp.powersgd_start_step = 2;
           }),
      with("buffers before evaluations",
           [](Setup& s) { s.ddp.broadcast_buffers = BroadcastBuffers::BeforeEval; })};
}

}  // namespace

TEST_CASE("a run with rehearsed steps has the bits of one without") {
  for (const auto& setup : setups()) {
    CAPTURE(setup.name);
    const auto train = [&](int64_t every) {
      Trainer trainer(setup, every);
      for (int64_t i = 0; i < 12; ++i) {
        trainer.run(i);
      }
      // All but the first two or three steps are checked, and the first check rehearses twice.
      CHECK((trainer.num_calls > 12) == (every > 0));
      return trainer.tensors();
    };
    const auto expected = train(0);
    require_equal(train(1), expected);
    require_equal(train(5), expected);
  }
}

TEST_CASE("a bit that changes in one of two runs of a step is found, and the rank is named") {
  for (const bool in_gradient : {false, true}) {
    for (const bool in_rehearsal : {false, true}) {
      for (int spoiled = 0; spoiled < world(); ++spoiled) {
        CAPTURE(in_gradient, in_rehearsal, spoiled);
        Trainer trainer({.name = "spoiled"}, 4);
        for (int64_t i = 0; i < 7; ++i) {
          trainer.run(i);  // the fourth is the first check
        }
        REQUIRE(trainer.num_calls == 9);
        if (rank() == spoiled) {
          (in_gradient ? trainer.spoils_gradient_in : trainer.spoils_activation_in) =
              in_rehearsal ? 10 : 11;
        }
        const auto message = message_of<MismatchError>([&] { trainer.run(7); });
        INFO(message);
        CHECK((message.find(concat("rank ", spoiled, " (")) == 0) == (rank() == spoiled));
        CHECK(message.empty() == (rank() != spoiled));
        if (!message.empty()) {
          CHECK(message.find("bucket 0 (") != std::string::npos);
          CHECK(message.find("train.replay_check_every=4") != std::string::npos);
        }
      }
    }
  }
}

TEST_CASE("a step that does not repeat is named once, trains on and is tried again") {
  Trainer trainer({.name = "irregular"}, 2);
  trainer.is_irregular = rank() == world() - 1;  // then no rank goes on alone
  const auto log = ::testing::stderr_of([&] {
    for (int64_t i = 0; i < 10; ++i) {
      trainer.run(i);
    }
  });
  CHECK(::testing::num_found(log, "train.deterministic=true") == (trainer.is_irregular ? 1 : 0));
  CHECK(trainer.num_calls == 20);  // steps 3 (due in 2), 4, 6, 8 and 10 are rehearsed twice
  trainer.is_irregular = false;
  trainer.run(10);
  trainer.spoils_gradient_in = trainer.num_calls + 3;  // the step behind its two rehearsals
  const auto message = message_of<MismatchError>([&] { trainer.run(11); });
  INFO(message);
  CHECK(message.find("train.deterministic=true") != std::string::npos);
  CHECK(message.find("adds in another order") != std::string::npos);
}

TEST_CASE("with deterministic algorithms a difference in the first check is a fault") {
  struct Deterministic {
    Deterministic() { at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false); }
    ~Deterministic() { at::globalContext().setDeterministicAlgorithms(false, false); }
  };
  const Deterministic deterministic;
  Trainer trainer({.name = "deterministic"}, 4);
  for (int64_t i = 0; i < 3; ++i) {
    trainer.run(i);
  }
  trainer.spoils_gradient_in = 5;  // the second rehearsal
  const auto message = message_of<MismatchError>([&] { trainer.run(3); });
  INFO(message);
  CHECK(message.find(concat("rank ", rank(), " (")) == 0);
  CHECK(message.find("is faulty") != std::string::npos);
}

TEST_CASE("a step without gradients is not rehearsed") {
  Trainer trainer({.name = "plain"}, 0);
  for (int64_t i = 0; i < 4; ++i) {
    trainer.run(i);
  }
  int64_t num_calls = 0;
  const torch::NoGradGuard no_grad;
  GraphedStep evaluation(
      context(), {.models = {&*trainer.model}},
      [&](const at::Tensor& batch, const StepScalars&) {
        ++num_calls;
        return trainer.model->forward(batch).sum();
      },
      GraphedStepOptions{.mode = CudaGraph::Off, .replay_check_every = 1});
  evaluation(batch_of(rank(), 0, 4), {});
  CHECK(num_calls == 1);
}

// The optimizer then ends the rehearsal.
TEST_CASE("a program that catches every exception of a backward updates nothing twice") {
  const auto train = [](int64_t every) {
    Trainer trainer({.name = "catching"}, 0);
    GraphedStep catching(
        context(), {.models = {&*trainer.model}, .optimizers = {trainer.optimizer.get()}},
        [&](const at::Tensor& batch, const StepScalars& scalars) {
          trainer.model->zero_grad();
          const auto loss = trainer.model->forward(batch).square().mean();
          try {
            loss.backward();
          } catch (const std::exception&) {
          }
          trainer.optimizer->step(scalars);
          return loss.detach();
        },
        GraphedStepOptions{.mode = CudaGraph::Off, .replay_check_every = every});
    for (int64_t i = 0; i < 6; ++i) {
      catching(batch_of(rank(), i, 4), {.lr = 0.0625});
    }
    return trainer.tensors();
  };
  require_equal(train(1), train(0));
}

namespace {

/// Calls of a lambda with parts that Trainer does not have; returns `tensors()` after the run.
template <typename Parts>
std::vector<at::Tensor> train_parts(int64_t every, int64_t num_steps) {
  torch::manual_seed(5);
  Parts parts;
  GraphedStep step(
      context(), parts.graphed(),
      [&](const at::Tensor& batch, const StepScalars& scalars) {
        return parts.run(batch, scalars);
      },
      GraphedStepOptions{.mode = CudaGraph::Off, .replay_check_every = every});
  for (int64_t i = 0; i < num_steps; ++i) {
    step(batch_of(rank(), i, 4), {.lr = 1.0 / 64, .step = i});
  }
  CHECK((parts.num_calls > num_steps) == (every > 0));
  return parts.tensors();
}

void add_clones(std::vector<at::Tensor>& all, const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    all.push_back(tensor.defined() ? tensor.detach().clone() : tensor);
  }
}

/// Two models with two synchronised backwards, or with one for both.
template <bool has_one_backward>
struct Gan {
  Mlp first{7}, second{8};
  DistributedDataParallel<Mlp> first_model{first, group()};
  DistributedDataParallel<Mlp> second_model{second, group()};
  std::unique_ptr<Optimizer> first_optimizer = make_optimizer(first_model, {.momentum = 0.5});
  std::unique_ptr<Optimizer> second_optimizer = make_optimizer(second_model, {.momentum = 0.5});
  int64_t num_calls = 0;

  GraphedParts graphed() {
    return {.models = {&first_model, &second_model},
            .optimizers = {first_optimizer.get(), second_optimizer.get()}};
  }
  at::Tensor run(const at::Tensor& batch, const StepScalars& scalars) {
    ++num_calls;
    first_model.zero_grad();
    second_model.zero_grad();
    if (has_one_backward) {
      (first_model.forward(batch).sum() + second_model.forward(batch).sum()).backward();
    } else {
      first_model.forward(batch).sum().backward();
      second_model.forward(batch).sum().backward();
    }
    first_optimizer->step(scalars);
    second_optimizer->step(scalars);
    return batch.new_zeros({1});
  }
  std::vector<at::Tensor> tensors() {
    std::vector<at::Tensor> all;
    add_clones(all, first->parameters());
    add_clones(all, second->parameters());
    add_clones(all, grads_of(*first));
    add_clones(all, grads_of(*second));
    return all;
  }
};

/// A step that changes ignored tensors, tensors outside of the model, and its own input.
struct Outsider {
  Net net;
  torch::nn::Linear outside{torch::nn::LinearOptions(3, 2)};
  std::optional<DistributedDataParallel<Net>> model;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<Optimizer> outer_optimizer;
  int64_t num_calls = 0;

  Outsider() {
    net->to(context().device());
    outside->to(context().device());
    DdpOptions options;
    options.parameters_to_ignore = {"norm.running_mean", "norm.num_batches_tracked"};
    model.emplace(net, group(), options);
    optimizer = make_optimizer(*model, {});
    outer_optimizer = wrap_optimizer(
        std::make_shared<torch::optim::SGD>(outside->parameters(), torch::optim::SGDOptions(0.125)),
        {{"weight", outside->weight}, {"bias", outside->bias}});
  }
  GraphedParts graphed() {
    return {.models = {&*model}, .optimizers = {optimizer.get(), outer_optimizer.get()}};
  }
  at::Tensor run(const at::Tensor& batch, const StepScalars& scalars) {
    ++num_calls;
    model->zero_grad();
    outside(model->forward(batch.add_(1))).square().mean().backward();
    optimizer->step(scalars);
    outer_optimizer->step();
    outer_optimizer->zero_grad();
    return batch.clone();
  }
  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> all;
    add_clones(all, net->parameters());
    add_clones(all, net->buffers());
    add_clones(all, outside->parameters());
    return all;
  }
};

}  // namespace

TEST_CASE("a step with several models is checked up to the end of its first backward") {
  require_equal(train_parts<Gan<false>>(1, 8), train_parts<Gan<false>>(0, 8));
  require_equal(train_parts<Gan<true>>(1, 8), train_parts<Gan<true>>(0, 8));
}

TEST_CASE("a rehearsal leaves ignored buffers, outer gradients and inputs as they were") {
  require_equal(train_parts<Outsider>(1, 8), train_parts<Outsider>(0, 8));
}

TEST_CASE("gradients that accumulate over several calls are checked where they are reduced") {
  for (const bool inside : {false, true}) {
    for (const int64_t every : {4, 5, 6}) {
      CAPTURE(inside, every);
      const auto train = [&](int64_t check_every, int64_t spoiled_step) {
        Trainer trainer({.name = "accumulated"}, 0);
        int64_t i = 0;
        int64_t num_calls_of_step = 0;
        GraphedStep step(
            context(), {.models = {&*trainer.model}, .optimizers = {trainer.optimizer.get()}},
            [&](const at::Tensor& batch, const StepScalars& scalars) {
              // The step runs behind its rehearsal.
              trainer.module->spoils_gradient = i == spoiled_step && ++num_calls_of_step == 2;
              std::optional<NoSync> no_sync;
              if (inside && i % 3 != 2) {
                no_sync.emplace(*trainer.model);
              }
              trainer.model->forward(batch).square().mean().backward();
              if (i % 3 == 2) {
                trainer.optimizer->step(scalars);
                trainer.model->zero_grad();
              }
              return batch.new_zeros({1});
            },
            GraphedStepOptions{.mode = CudaGraph::Off, .replay_check_every = check_every});
        for (; i < 24; ++i) {
          std::optional<NoSync> no_sync;
          if (!inside && i % 3 != 2) {
            no_sync.emplace(*trainer.model);
          }
          step(batch_of(rank(), i, 4, 6), {.lr = 0.0625, .step = i});
        }
        return trainer.tensors();
      };
      require_equal(train(every, -1), train(0, -1));
      const int64_t due = 3 * every;  // calls, of which the last is counted as due
      const int64_t checked = due % 3 == 0 ? due - 1 : due;
      CHECK_FALSE(message_of<MismatchError>([&] { train(every, checked); }).empty());
    }
  }
}
