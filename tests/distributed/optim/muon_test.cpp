// SPDX-License-Identifier: Apache-2.0
// Muon over several ranks: each updates its share of the matrices, and all have the bits of one
// process that updates all of them with the same gradients.
#include <torch/torch.h>

#include <optional>

#include "ddp/amp/amp.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/join.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "distributed/state_parts.hpp"
#include "support/message_of.hpp"
#include "support/same_bits.hpp"

using namespace ddp;
using namespace ddp::test;
using ::testing::message_of;
using ::testing::same_bits;

namespace {

constexpr double kLr = 0.015625;

// Matrices of both dtypes in more batches than there are ranks, and parameters for AdamW.
struct MatricesImpl : torch::nn::Module {
  MatricesImpl() {
    const std::vector<std::pair<std::string, std::vector<int64_t>>> shapes{
        {"tall", {24, 10}},     {"wide", {10, 24}}, {"square", {16, 16}},   {"embed", {9, 4}},
        {"conv", {6, 4, 3, 3}}, {"half", {12, 20}}, {"half_tall", {20, 8}}, {"half_square", {6, 6}},
        {"row", {1, 5}},        {"empty", {0, 3}},  {"bias", {7}},          {"slow", {16, 16}}};
    for (size_t i = 0; i < shapes.size(); ++i) {
      const auto& [name, shape] = shapes[i];
      auto value = integers(shape, 40 + static_cast<int64_t>(i)) * 0.25 + 1;
      if (name == "conv") {
        value = value.to(torch::MemoryFormat::ChannelsLast);
      }
      const auto dtype = name.starts_with("half") ? torch::kBFloat16 : torch::kFloat;
      weights.push_back(register_parameter(name, value.to(dtype)));
    }
  }
  // d loss / d weight = integers of (seed, weight)
  torch::Tensor forward(int64_t seed) {
    auto loss = torch::zeros({}, on_device());
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto gradient =
          integers(weights[i].sizes().vec(), seed * 100 + static_cast<int64_t>(i));
      loss = loss + (weights[i].to(torch::kFloat) * gradient).sum();
    }
    return loss;
  }
  std::vector<torch::Tensor> weights;
};
TORCH_MODULE(Matrices);

// A head, listed before its submodules, that shares the weight of an embedding with sparse
// gradients.
struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(bool sparse) {
    hidden = register_parameter("hidden", integers({4, 4}, 2));
    embed = register_module("embed",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 4).sparse(sparse)));
    embed->to(context().device());
    {
      const torch::NoGradGuard no_grad;
      embed->weight.copy_(integers({5, 4}, 1));
    }
    register_parameter("output", embed->weight);
  }
  torch::Tensor forward(int64_t seed) {
    const auto ids = torch::tensor({1, 3}, on_device().dtype(torch::kLong));
    return (embed(ids).matmul(hidden) * integers({2, 4}, seed)).sum();
  }
  torch::Tensor hidden;
  torch::nn::Embedding embed{nullptr};
};
TORCH_MODULE(Tied);

OptimizerOptions muon_options() {
  OptimizerOptions options;
  options.type = OptimizerType::Muon;
  options.weight_decay = 0.125;
  options.groups = {{.patterns = {"slow"}, .lr_scale = 0.5, .weight_decay = 0.0}};
  return options;
}

DdpOptions checked() {
  DdpOptions options;
  options.desync_check_every = 1;
  return options;
}

struct Trainer {
  explicit Trainer(CommunicatorPtr communicator = group(),
                   const OptimizerOptions& options = muon_options())
      : model(module, std::move(communicator), checked()),
        optimizer(make_optimizer(model, options)) {}

  void backward(int64_t seed) {
    model.zero_grad();
    model.forward(seed).backward();
  }
  void train(int64_t seed) {
    backward(seed);
    optimizer->step(kLr);
  }

  Matrices module;
  DistributedDataParallel<Matrices> model;
  std::unique_ptr<Optimizer> optimizer;
};

// One process that updates all matrices. It takes the averaged gradients of a Trainer.
struct OneProcess {
  OneProcess() {
    for (const auto& item : module->named_parameters()) {
      parameters.push_back({item.key(), item.value()});
    }
    optimizer = make_optimizer(parameters, muon_options());
  }

  void step(const Trainer& trainer, const StepScalars& scalars) {
    for (size_t i = 0; i < module->weights.size(); ++i) {
      const auto& gradient = trainer.module->weights[i].grad();
      module->weights[i].mutable_grad() = gradient.defined() ? gradient.clone() : torch::Tensor();
    }
    optimizer->step(scalars);
  }

  Matrices module;
  NamedParameters parameters;
  std::unique_ptr<Optimizer> optimizer;
};

void require_same_weights(const Matrices& a, const Matrices& b) {
  for (size_t i = 0; i < a->weights.size(); ++i) {
    INFO("parameter " << i);
    REQUIRE(same_bits(a->weights[i].detach().cpu(), b->weights[i].detach().cpu()));
  }
}

void require_same_state(const StateDict& left, const StateDict& right) {
  const StateDict a = copy_of(left);
  const StateDict b = copy_of(right);
  REQUIRE((a.values == b.values));
  REQUIRE(a.tensors.size() == b.tensors.size());
  for (const auto& [key, tensor] : a.tensors) {
    INFO(key.text());
    REQUIRE(same_bits(tensor.cpu(), b.tensors.at(key).cpu()));
  }
}

void copy_weights(const Matrices& from, const Matrices& to) {
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < from->weights.size(); ++i) {
    to->weights[i].copy_(from->weights[i]);
  }
}

int64_t seed_of(int64_t step) {
  return step * 8 + rank();
}

}  // namespace

TEST_CASE("Muon over any number of ranks has the bits of one process") {
  Trainer trainer;
  OneProcess one;
  for (int64_t step = 0; step < 6; ++step) {
    CAPTURE(step);
    trainer.backward(seed_of(step));
    const StepScalar lr =
        step % 2 == 0 ? StepScalar(kLr) : StepScalar(torch::full({}, kLr, on_device()));
    one.step(trainer, {.lr = lr, .clip_factor = 0.75});
    trainer.optimizer->step({.lr = lr, .clip_factor = 0.75});
    require_same_weights(trainer.module, one.module);
  }
  require_same_state(trainer.optimizer->state_dict(), one.optimizer->state_dict());
}

TEST_CASE("each matrix's momentum is on one rank, and no rank has all") {
  Trainer trainer;
  trainer.train(seed_of(0));
  const auto state = trainer.optimizer->state_dict();
  int64_t own = 0;
  for (const auto& [key, parts] : state.parts) {
    REQUIRE(parts.size() == 1);
    own += key.slot == "momentum_buffer";
  }
  auto all = torch::full({1}, own, on_device().dtype(torch::kLong));
  group()->all_reduce(all)->wait();
  if (world() == 1) {
    CHECK(own == 0);  // the state is whole
    return;
  }
  CHECK(all.item<int64_t>() == 10);
  CHECK(own > 0);
  CHECK(own < 10);
  for (const auto& [key, tensor] : trainer.optimizer->replicated_state().tensors) {
    INFO(key.text());
    CHECK((key.parameter == "embed" || key.parameter == "bias"));
  }
}

TEST_CASE("a matrix that is frozen late stays, and the others go on") {
  Trainer trainer;
  OneProcess one;
  for (int64_t step = 0; step < 6; ++step) {
    CAPTURE(step);
    for (const size_t frozen : {0, 5}) {
      trainer.module->weights[frozen].set_requires_grad(step < 2 || step > 3);
    }
    trainer.backward(seed_of(step));
    REQUIRE(trainer.module->weights[0].grad().defined() == (step < 2 || step > 3));
    const auto version = trainer.module->weights[0]._version();
    one.step(trainer, {.lr = kLr});
    trainer.optimizer->step(kLr);
    CHECK((trainer.module->weights[0]._version() > version) == (step < 2 || step > 3));
    require_same_weights(trainer.module, one.module);
  }
  require_same_state(trainer.optimizer->state_dict(), one.optimizer->state_dict());
}

TEST_CASE("a loss scale's skipped step changes no matrix on any rank") {
  AmpOptions amp;
  amp.grad_scaling = GradScaling::On;
  amp.init_scale = 1024;
  GradScaler scaler(amp);
  Trainer scaled;
  Trainer plain;
  for (int64_t step = 0; step < 4; ++step) {
    CAPTURE(step);
    if (step == 0 || step == 2) {
      scaled.model.zero_grad();
      const double factor = rank() == world() - 1 ? std::numeric_limits<double>::infinity() : 1;
      scaler.scale(scaled.model.forward(seed_of(step)) * factor).backward();
      scaler.step(*scaled.optimizer, kLr);
      scaler.update();
      require_same_weights(scaled.module, plain.module);
    }
    scaled.model.zero_grad();
    scaler.scale(scaled.model.forward(seed_of(step))).backward();
    scaler.clip_and_step(*scaled.optimizer, {.lr = kLr}, 1e9);
    scaler.update();
    plain.train(seed_of(step));
    require_same_weights(scaled.module, plain.module);
  }
  CHECK(scaler.get_scale() == 256);
  require_same_state(scaled.optimizer->state_dict(), plain.optimizer->state_dict());
}

// The gradients are equal on all ranks, so their mean does not depend on the number of ranks.
TEST_CASE("state of all ranks continues on fewer ranks, and on one, with equal bits") {
  Trainer whole;
  for (int64_t step = 0; step < 3; ++step) {
    whole.train(step);
  }
  const StateDict joined = copy_of(whole.optimizer->state_dict());
  const StateDict parts = with_all_parts(whole.optimizer->state_dict());
  const int fewer = std::max(1, world() - 1);
  const auto part = group()->split(rank() < fewer ? 0 : -1, rank());
  std::optional<Trainer> resumed;
  if (part) {
    resumed.emplace(part);
    resumed->optimizer->load_state_dict(parts);
    copy_weights(whole.module, resumed->module);
  }
  OneProcess one;
  one.optimizer->load_state_dict(joined);
  copy_weights(whole.module, one.module);
  for (int64_t step = 3; step < 6; ++step) {
    CAPTURE(step);
    whole.backward(step);
    one.step(whole, {.lr = kLr});
    whole.optimizer->step(kLr);
    require_same_weights(one.module, whole.module);
    if (resumed) {
      resumed->train(step);
      require_same_weights(resumed->module, whole.module);
    }
  }
}

TEST_CASE("a saved state without a part of an owner's matrix is refused and changes nothing") {
  Trainer trainer;
  trainer.train(seed_of(0));
  auto saved = with_all_parts(trainer.optimizer->state_dict());
  for (auto& [key, tensor] : saved.tensors) {
    tensor = tensor.clone();
  }
  for (auto& [key, parts] : saved.parts) {
    parts.front().tensor = parts.front().tensor.narrow(0, 0, parts.front().tensor.numel() / 2);
  }
  trainer.train(seed_of(1));
  const auto before = copy_of(trainer.optimizer->state_dict());
  if (world() > 1) {
    REQUIRE_THROWS_AS(trainer.optimizer->load_state_dict(saved), MismatchError);
  }
  require_same_state(trainer.optimizer->state_dict(), before);
}

TEST_CASE("sync_module_states resets Muon's masters") {
  Trainer trainer;
  trainer.train(seed_of(0));
  trainer.model.sync_module_states();
  for (const auto& [key, tensor] : copy_of(trainer.optimizer->state_dict()).tensors) {
    if (key.slot == "master") {
      INFO(key.text());
      const auto master = tensor.cpu();
      CHECK(same_bits(master, master.to(torch::kBFloat16).to(torch::kFloat)));
    }
  }
}

TEST_CASE("what a collective step of Muon does not allow is refused") {
  Trainer trainer;
  if (world() > 1) {
    CHECK(message_of<SettingsError>([&] {
            join(trainer.model, [] {});
          }).find("optimizer.type=muon") != std::string::npos);
    trainer.optimizer.reset();
  }
  CHECK_NOTHROW(join(trainer.model, [] {}));
  auto options = muon_options();
  options.zero1 = true;
  CHECK(message_of<SettingsError>([&] {
          make_optimizer(trainer.model, options);
        }).find("each rank already keeps the momentum") != std::string::npos);
}

TEST_CASE("a model's shared weight is left to AdamW if any of its names is") {
  Tied module(/*sparse=*/false);
  DistributedDataParallel<Tied> model(module, group());
  REQUIRE(model.trained_parameters().size() == 2);
  const auto optimizer = make_optimizer(model, {.type = OptimizerType::Muon});
  model.forward(seed_of(0)).backward();
  optimizer->step(kLr);
  const auto state = copy_of(optimizer->state_dict());
  CHECK(state.contains("state.hidden.momentum_buffer"));
  CHECK(state.contains("state.output.exp_avg"));
}

TEST_CASE("a step that AdamW refuses leaves equal matrices on all ranks") {
  Tied module(/*sparse=*/true);
  DdpOptions options;
  options.sparse = SparseGradients::Gather;
  DistributedDataParallel<Tied> model(module, group(), options);
  const auto optimizer = make_optimizer(model, {.type = OptimizerType::Muon});
  model.forward(seed_of(0)).backward();
  CHECK(message_of<SettingsError>([&] { optimizer->step(kLr); }).find("is sparse") !=
        std::string::npos);
  const auto mine = module->hidden.detach().reshape({1, 4, 4});
  auto all = torch::empty({world(), 4, 4}, mine.options());
  group()->all_gather(all, mine)->wait();
  CHECK(torch::equal(all, mine.expand({world(), 4, 4})));
}
