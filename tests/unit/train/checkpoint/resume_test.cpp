// SPDX-License-Identifier: Apache-2.0
#include "core/settings/setting_row.hpp"
#include "ddp/core/safetensors.hpp"
#include "ddp/optim/ema.hpp"
#include "ddp/train/checkpoint.hpp"
#include "ddp/train/weights.hpp"
#include "support/catch.hpp"
#include "support/stderr_of.hpp"
#include "unit/train/checkpoint/resume_run.hpp"
#include "unit/train/temporary_folder.hpp"
#include "unit/train/thread_control_plane.hpp"

using testing::Precision;
using testing::ResumeCase;
using testing::ResumeRun;

namespace {

// What a run of one rank saves with.
struct SavingRank {
  SavingRank() { options.dir = folder.file("ckpt"); }

  const ddp::CommunicatorPtr communicator = ddp::make_single_communicator(at::kCPU);
  testing::TemporaryFolder folder;
  testing::ThreadJob job{1};
  testing::ThreadControlPlane plane{job, 0};
  ddp::CheckpointOptions options;
};

}  // namespace

TEST_CASE_METHOD(
    SavingRank,
    "resuming is bit-exact for every precision, optimizer, save mode and accumulation") {
  // 3 x 3 x 2 x 2 = 36 cases.
  const auto precision = GENERATE(Precision::Fp32, Precision::Bf16Leaves, Precision::Fp16Scaled);
  const auto type =
      GENERATE(ddp::OptimizerType::Sgd, ddp::OptimizerType::Adam, ddp::OptimizerType::AdamW);
  const bool async = GENERATE(false, true);
  const int accumulate = GENERATE(1, 4);
  INFO("precision " << static_cast<int>(precision) << ", optimizer " << static_cast<int>(type)
                    << ", async " << async << ", accumulate " << accumulate);
  const ResumeCase setup{precision, type, accumulate};
  constexpr int kHalf = 5;
  options.async = async;

  ResumeRun undisturbed(setup, communicator);
  torch::manual_seed(11);
  for (int step = 0; step < 2 * kHalf; ++step) {
    undisturbed.step();
  }

  std::vector<double> losses;
  {
    ResumeRun first(setup, communicator);
    torch::manual_seed(11);
    ddp::Checkpointer checkpointer(plane, at::kCPU, options,
                                   {first.model, first.optimizer, first.scaler});
    REQUIRE(checkpointer.restore() == 0);
    for (int step = 0; step < kHalf; ++step) {
      first.step();
    }
    losses = first.losses;
    checkpointer.save(kHalf - 1);
    first.step();  // lost in the crash
  }
  ResumeRun second(setup, communicator);
  ddp::Checkpointer checkpointer(plane, at::kCPU, options,
                                 {second.model, second.optimizer, second.scaler});
  auto step = checkpointer.restore();
  REQUIRE(step == kHalf);
  for (; step < 2 * kHalf; ++step) {
    second.step();
  }
  losses.insert(losses.end(), second.losses.begin(), second.losses.end());
  REQUIRE(testing::first_difference(undisturbed.tensors(), second.tensors()) == "");
  const bool same_values = undisturbed.values() == second.values();
  REQUIRE(same_values);
  REQUIRE(losses == undisturbed.losses);
}

TEST_CASE_METHOD(SavingRank,
                 "a checkpoint of another model is refused with the first key, nothing changed") {
  ResumeRun run({}, communicator);
  {
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {run.model, run.optimizer});
    checkpointer.save(0);
  }
  torch::nn::Sequential other(torch::nn::Linear(6, 17), torch::nn::Linear(17, 4));
  ddp::DistributedDataParallel model(other, communicator);
  auto optimizer = ddp::make_optimizer(model, testing::optimizer_options(ddp::OptimizerType::Sgd));
  const auto before = other->parameters()[0].clone();
  ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model, optimizer});
  std::string message;
  try {
    checkpointer.restore();
  } catch (const ddp::MismatchError& error) {
    message = error.what();
  }
  REQUIRE_THAT(message, Catch::Contains("0.bias") || Catch::Contains("0.weight"));
  REQUIRE(other->parameters()[0].equal(before));
}

TEST_CASE_METHOD(SavingRank,
                 "a resumed run keeps its dtype: another one is refused by the parameter's name") {
  const bool narrows = GENERATE(true, false);
  const auto run_in = [&](bool is_wide) {
    const auto precision = is_wide ? Precision::Fp32 : Precision::Bf16Leaves;
    return std::make_unique<ResumeRun>(ResumeCase{precision, ddp::OptimizerType::Adam, 1},
                                       communicator);
  };
  const auto saved = run_in(narrows);
  saved->step();
  ddp::Checkpointer(plane, at::kCPU, options, {saved->model, saved->optimizer}).save(0);
  const auto resumed = run_in(!narrows);
  ddp::Checkpointer checkpointer(plane, at::kCPU, options, {resumed->model, resumed->optimizer});
  CHECK_THROWS_WITH(
      checkpointer.restore(),
      Catch::Contains(narrows ? "is Float in the checkpoint and BFloat16 in this run"
                              : "is BFloat16 in the checkpoint and Float in this run") &&
          Catch::Contains("model.dtype"));
}

TEST_CASE_METHOD(SavingRank,
                 "one checkpoint holds two models and their optimizers under the list's names") {
  const auto precision = GENERATE(Precision::Fp32, Precision::Bf16Leaves);
  const ResumeCase setup{precision, ddp::OptimizerType::Adam, 1};
  const auto make_checkpointer = [&](ResumeRun& generator, ResumeRun& discriminator) {
    std::vector<ddp::StatefulRef> objects{discriminator.model, discriminator.optimizer};
    objects.push_back({"generator", generator.model});
    objects.push_back({"generator_optimizer", generator.optimizer});
    return ddp::Checkpointer(plane, at::kCPU, options, objects);
  };
  ResumeRun generator(setup, communicator), discriminator(setup, communicator);
  generator.step();
  discriminator.step();
  discriminator.step();
  {
    auto checkpointer = make_checkpointer(generator, discriminator);
    checkpointer.save(0);
  }
  const auto folder_of_step = options.dir + "/step_0000000001/";
  for (const auto& [file, key] :
       {std::pair("model", "0.weight"), {"generator", "generator.0.weight"}}) {
    const auto tensors = ddp::load_safetensors(folder_of_step + file + ".safetensors").tensors;
    const auto leaf = ddp::named_weights(*generator.model.module()).at("0.weight");
    REQUIRE(tensors.at(key).scalar_type() == leaf.scalar_type());
  }
  auto alone = testing::make_module(precision, at::kCPU);
  ddp::load_weights(*alone, folder_of_step + "generator.safetensors", "generator");
  for (const auto& [name, tensor] : ddp::named_weights(*alone)) {
    REQUIRE(tensor.equal(ddp::named_weights(*generator.model.module()).at(name)));
  }
  ResumeRun other_generator(setup, communicator), other_discriminator(setup, communicator);
  auto checkpointer = make_checkpointer(other_generator, other_discriminator);
  REQUIRE(checkpointer.restore() == 1);
  REQUIRE(testing::first_difference(generator.tensors(), other_generator.tensors()) == "");
  REQUIRE(testing::first_difference(discriminator.tensors(), other_discriminator.tensors()) == "");
  REQUIRE(testing::first_difference(generator.tensors(), discriminator.tensors()) != "");

  ResumeRun evaluated(setup, communicator);  // the model alone, without a trace in the folder
  options.read_only = true;
  ddp::Checkpointer reader(plane, at::kCPU, options, {{"generator", evaluated.model}});
  REQUIRE(reader.restore() == 1);
  for (const auto& [name, tensor] : generator.model.state_dict().tensors) {
    REQUIRE(evaluated.model.state_dict().tensors.at(name).equal(tensor));
  }
}

TEST_CASE("messages of a backward and a checkpoint name the model as it was wrapped") {
  const auto communicator = ddp::make_single_communicator(at::kCPU);
  const auto used = torch::ones({2}).requires_grad_(), unused = torch::ones({2}).requires_grad_();
  const std::string name = GENERATE("model", "generator");
  ddp::DdpOptions options;
  options.name = name;
  ddp::DataParallelModel model({.parameters = {{"used", used}, {"unused", unused}}}, communicator,
                               options);
  CHECK(model.state_name() == name);
  model.prepare_for_backward();
  (used * 2).sum().backward();
  CHECK_THROWS_WITH(model.prepare_for_backward(),
                    Catch::Contains(name == "model" ? "the previous backward left 1 of 2"
                                                    : "the previous backward of model 'generator' "
                                                      "left 1 of 2"));
  unused.set_requires_grad(false);
  CHECK_THROWS_WITH(
      torch::autograd::backward({(used * used).sum()}, {}, true, /*create_graph=*/true),
      Catch::Contains(name == "model" ? "parameter used: gradients"
                                      : "parameter used of model 'generator': gradients"));
}

TEST_CASE("averages of a model include its buffers") {
  testing::TemporaryFolder folder;
  torch::nn::BatchNorm1d module(2);
  ddp::DistributedDataParallel model(module, ddp::make_single_communicator(at::kCPU));
  ddp::Ema ema(model, {.decay = 0.5});
  const auto change = [&](double weight, double mean) {
    const torch::NoGradGuard no_grad;
    module->weight.fill_(weight);
    module->running_mean.fill_(mean);
    module->num_batches_tracked += 1;
  };
  change(3, 8);  // from 1 and 0
  ema.update();
  change(4, 12);
  ema.update();
  {
    const auto swap = ema.swap_in();
    ddp::save_weights(*module, folder.file("ema.safetensors"));
  }
  const auto saved = ddp::load_safetensors(folder.file("ema.safetensors")).tensors;
  CHECK(saved.at("weight").equal(torch::full({2}, 3.0)));
  CHECK(saved.at("running_mean").equal(torch::full({2}, 8.0)));
  CHECK(saved.at("running_var").equal(torch::ones({2})));
  CHECK(saved.at("num_batches_tracked").item<int64_t>() == 2);
  CHECK(module->running_mean.equal(torch::full({2}, 12.0)));

  const auto state = ema.state_dict();
  CHECK(state.tensors.at("running_mean").equal(torch::full({2}, 8.0)));
  ddp::Ema other(model, {.decay = 0.5});
  other.load_state_dict(state);
  CHECK(other.state_dict().tensors.at("running_mean").equal(torch::full({2}, 8.0)));
}

TEST_CASE("averages saved without buffers load, and say so") {
  torch::nn::BatchNorm1d module(2);
  ddp::DistributedDataParallel model(module, ddp::make_single_communicator(at::kCPU));
  ddp::Ema ema(model);
  const auto old = torch::full({2}, 5.0);
  {
    const torch::NoGradGuard no_grad;
    module->running_mean.fill_(7);
  }
  const auto log = testing::stderr_of([&] {
    ema.load_state_dict({.tensors = {{"weight", old}, {"bias", old}}, .values = {}});
  });
  CHECK_THAT(log, Catch::Contains("averages of 3 buffers") &&
                      Catch::Contains("start again at the model's current values"));
  const auto state = ema.state_dict();
  CHECK(state.tensors.at("weight").equal(old));
  CHECK(state.tensors.at("running_mean").equal(torch::full({2}, 7.0)));
  auto partial = state;
  partial.tensors.erase("running_var");
  CHECK_THROWS_WITH(ema.load_state_dict(partial), Catch::Contains("running_var is missing"));
}

TEST_CASE("averages follow buffers that a module replaces") {
  struct Replacing : torch::nn::Module {
    torch::Tensor forward(const torch::Tensor& x) {
      mean = x.mean(0).detach();
      return x * weight;
    }
    torch::Tensor weight = register_parameter("weight", torch::ones({2}));
    torch::Tensor& mean = register_buffer("mean", torch::zeros({2}));
  };
  const auto module = std::make_shared<Replacing>();
  ddp::DistributedDataParallel model(module, ddp::make_single_communicator(at::kCPU));
  ddp::Ema ema(model, {.decay = 0.5});
  model.forward(torch::full({3, 2}, 4.0));
  ema.update();
  CHECK(ema.state_dict().tensors.at("mean").equal(torch::full({2}, 2.0)));
  {
    const auto swap = ema.swap_in();
    CHECK(module->mean.equal(torch::full({2}, 2.0)));
  }
  CHECK(module->mean.equal(torch::full({2}, 4.0)));
}
