// SPDX-License-Identifier: Apache-2.0
// Checkpoints and plans that an earlier commit wrote (tests/golden/make_checkpoint_golden.cpp) load
// with every bit.
#include <memory>
#include <string>

#include "comm/tuning/group_choices.hpp"
#include "ddp/amp/amp.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/data/data_loader.hpp"
#include "ddp/optim/ema.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/train/checkpoint.hpp"
#include "ddp/train/config.hpp"
#include "ops/shared/choice_book.hpp"
#include "support/catch.hpp"
#include "support/stderr_of.hpp"
#include "unit/golden/golden_state.hpp"
#include "unit/train/temporary_folder.hpp"

using golden::first_difference;
using golden::Net;
using testing::num_found;
using testing::stderr_of;

namespace {

struct Numbers {
  static int64_t size() { return 22; }
  static ddp::Example get(int64_t index) {
    const auto number = at::scalar_tensor(index, at::kLong);
    return {number, number};
  }
};

ddp::Context make_context(const std::string& plan_file = "") {
  ddp::ContextOptions options;
  options.device = ddp::DeviceChoice::Cpu;
  options.plan_file = plan_file;
  return ddp::Context::create(options);
}

std::unique_ptr<ddp::Optimizer> lone_optimizer(ddp::OptimizerType type) {
  return ddp::make_optimizer({{"lone", at::zeros({5}).requires_grad_()}},
                             {.type = type, .momentum = golden::kMomentum});
}

/// The settings that save_sgd() had, with another folder.
ddp::Config sgd_config(const std::string& dir) {
  const auto folder = "checkpoint.dir=" + dir;
  const char* const arguments[] = {"golden",
                                   "optimizer.type=sgd",
                                   "optimizer.momentum=0.5",
                                   "optimizer.weight_decay=0.25",
                                   "amp.dtype=fp16",
                                   "amp.init_scale=1024",
                                   "amp.growth_interval=2",
                                   "sampler.seed=5",
                                   "loader.batch_size=4",
                                   folder.c_str()};
  return ddp::Config::from_command_line(std::size(arguments), arguments);
}

/// Objects as save_sgd() had them, before anything is loaded.
struct SgdRun {
  SgdRun(const ddp::Context& ctx, const ddp::Config& cfg)
      : model(Net(at::kFloat), ctx.communicator()),
        optimizer(ddp::make_optimizer(model, cfg.optimizer)),
        ema(model, {.decay = golden::kEmaDecay}),
        scaler(cfg.amp),
        loader(std::make_shared<Numbers>(),
               ddp::DistributedSampler(Numbers::size(), 0, 1, cfg.sampler), at::kCPU, cfg.loader),
        checkpointer(ctx, cfg.checkpoint,
                     {model,
                      optimizer,
                      ema,
                      scaler,
                      loader,
                      own,
                      {"adam", *adam},
                      {"lars", *lars},
                      {"lamb", *lamb}}) {}

  ddp::DistributedDataParallel<Net> model;
  std::unique_ptr<ddp::Optimizer> optimizer;
  ddp::Ema ema;
  ddp::GradScaler scaler;
  ddp::DataLoader<Numbers> loader;
  golden::Own own;
  std::unique_ptr<ddp::Optimizer> adam = lone_optimizer(ddp::OptimizerType::Adam);
  std::unique_ptr<ddp::Optimizer> lars = lone_optimizer(ddp::OptimizerType::Lars);
  std::unique_ptr<ddp::Optimizer> lamb = lone_optimizer(ddp::OptimizerType::Lamb);
  ddp::Checkpointer checkpointer;
};

void check_sgd_states(const SgdRun& run) {
  golden::Tensors weights, momenta, averages;
  golden::for_each_trained([&](const std::string& name, at::IntArrayRef shape, int64_t salt) {
    const auto all = [&](double golden::SgdElement::*member) {
      return golden::filled(shape, [&](int64_t i) { return golden::after_sgd(i, salt).*member; });
    };
    weights[name] = all(&golden::SgdElement::weight);
    momenta["state." + name + ".momentum_buffer"] = all(&golden::SgdElement::momentum);
    averages[name] = all(&golden::SgdElement::average);
  });
  golden::add_frozen(weights, at::kFloat);
  golden::add_buffers(weights, at::kFloat);
  golden::add_buffers(averages, at::kFloat);  // saved without them: they start at the model's
  CHECK(first_difference(run.model.state_dict(), {.tensors = weights, .values = {}}) == "");
  CHECK(first_difference(run.optimizer->state_dict(),
                         {.tensors = momenta, .values = {{"type", std::string("sgd")}}}) == "");
  CHECK(first_difference(run.ema.state_dict(), {.tensors = averages, .values = {}}) == "");
}

void check_lone_states(const SgdRun& run) {
  golden::Tensors moments, momentum;
  golden::add_adam_slots(moments, "lone", {5},
                         [](int64_t i) { return golden::coefficient(i, 20); });
  momentum["state.lone.momentum_buffer"] =
      golden::filled({5}, [](int64_t i) { return golden::kLr * golden::coefficient(i, 20); });
  CHECK(first_difference(run.adam->state_dict(),
                         {.tensors = moments, .values = {{"type", std::string("adam")}}}) == "");
  CHECK(first_difference(run.lars->state_dict(),
                         {.tensors = momentum, .values = {{"type", std::string("lars")}}}) == "");
  CHECK(first_difference(run.lamb->state_dict(),
                         {.tensors = moments, .values = {{"type", std::string("lamb")}}}) == "");
}

}  // namespace

TEST_CASE("an earlier commit's checkpoint of SGD returns every bit of every object") {
  const testing::TemporaryFolder folder;
  const auto cfg = sgd_config(golden::copy_of("sgd", folder.path()));
  const auto ctx = make_context();
  SgdRun run(ctx, cfg);
  const auto random_numbers = golden::next_random_numbers(0);
  int64_t step = 0;
  const auto log = stderr_of([&] { step = run.checkpointer.restore(); });
  CHECK(step == golden::kSgdSteps);
  CHECK(testing::same_bits(torch::randint(1 << 20, {8}), random_numbers));
  CHECK(num_found(log, "resumed from") == 1);
  CAPTURE(log);
  CHECK(num_found(log, "warning") == 0);  // nor does it report removed settings

  check_sgd_states(run);
  check_lone_states(run);
  // Three finite steps with a growth interval of two: the scale doubled once.
  CHECK(first_difference(run.scaler.state_dict(), {.tensors = {},
                                                   .values = {{"scale", 2048.0},
                                                              {"growth_factor", 2.0},
                                                              {"backoff_factor", 0.5},
                                                              {"growth_interval", int64_t{2}},
                                                              {"_growth_tracker", int64_t{1}}}}) ==
        "");
  auto own = golden::own_state(0);
  own.tensors["next_samples"] = run.own.state.tensors.at("next_samples");
  CHECK(first_difference(run.own.state, own) == "");
  // Eight batches of four: an epoch of 22 samples has six.
  CHECK(run.loader.epoch() == 1);
  CHECK(run.loader.position() == 8);
  CHECK(testing::same_bits(run.loader.next().target, own.tensors.at("next_samples")));
  CHECK(run.checkpointer.text("note") == "a text of the program");
  CHECK(ctx.communicator()->choices().plan().find("kernels") == golden::kGivenKernels);
}

TEST_CASE("an earlier commit's checkpoint of AdamW returns masters, leaves and the base's print") {
  const testing::TemporaryFolder folder;
  const auto ctx = make_context();
  Net net(at::kBFloat16);
  net->fill();  // the base, which the checkpoint left out
  for (auto& parameter : net->parameters()) {
    if (parameter.requires_grad()) {
      parameter.detach().zero_();
    }
  }
  ddp::DistributedDataParallel model(net, ctx.communicator());
  model.leave_frozen_out_of_state();
  auto optimizer = ddp::make_optimizer(model, {.type = ddp::OptimizerType::AdamW, .amsgrad = true});
  ddp::CheckpointOptions options;
  options.dir = golden::copy_of("adamw", folder.path());
  ddp::Checkpointer checkpointer(ctx, options, {model, optimizer});
  CHECK(checkpointer.restore() == 1);

  auto state = golden::adam_state_with_masters(golden::kWeightDecay, 1);
  golden::for_each_trained([&](const std::string& name, at::IntArrayRef, int64_t) {
    const auto prefix = "state." + name + ".";
    state[prefix + "max_exp_avg_sq"] = state.at(prefix + "exp_avg_sq");
  });
  CHECK(first_difference(optimizer->state_dict(),
                         {.tensors = state, .values = {{"type", std::string("adamw")}}}) == "");
  auto leaves = golden::adam_leaves(golden::kWeightDecay);
  golden::add_buffers(leaves, at::kBFloat16);
  CHECK(first_difference(model.state_dict(),
                         {.tensors = leaves,
                          .values = {{"frozen_parameters", model.compute_frozen_fingerprint()}}}) ==
        "");
}

TEST_CASE("one rank resumes an earlier commit's ZeRO of two, with and without ZeRO") {
  const bool zero1 = GENERATE(false, true);
  const testing::TemporaryFolder folder;
  const auto ctx = make_context();
  Net net(at::kBFloat16);
  ddp::DistributedDataParallel model(net, ctx.communicator());
  auto optimizer = ddp::make_optimizer(model, {.type = ddp::OptimizerType::Adam, .zero1 = zero1});
  golden::Own own;
  ddp::CheckpointOptions options;
  options.dir = golden::copy_of("zero", folder.path());
  ddp::Checkpointer checkpointer(ctx, options, {model, optimizer, own});
  CHECK(checkpointer.restore() == 1);
  CHECK(first_difference(golden::whole_of(optimizer->state_dict()),
                         {.tensors = golden::adam_state_with_masters(0, 2),
                          .values = {{"type", std::string("adam")}}}) == "");
  auto leaves = golden::adam_leaves(0);
  golden::add_frozen(leaves, at::kBFloat16);
  golden::add_buffers(leaves, at::kBFloat16);
  CHECK(first_difference(model.state_dict(), {.tensors = leaves, .values = {}}) == "");
  CHECK(first_difference(own.state, golden::own_state(0)) == "");
}

TEST_CASE("an earlier commit's plan file is taken and left as it is") {
  const testing::TemporaryFolder folder;
  const auto file = golden::copy_of("plan_of_one_rank.json", folder.path());
  const auto before = testing::read_file(file);
  auto ctx = make_context(file);
  CHECK(ctx.communicator()->choices().plan().find("kernels") == golden::kGivenKernels);
  auto& book = ddp::ops::detail::ChoiceBook::instance();
  CHECK(book.find("a product", 5) == 4);
  CHECK(book.find("a convolution", 7) == 2);
  ctx.close();
  CHECK(testing::read_file(file) == before);
}
