// SPDX-License-Identifier: Apache-2.0
// Writes the files in tests/golden/checkpoints: checkpoints, plans and a LoRA adapter.
//
// They were written by commit ea6669a (0.1.0 before its first release), whose public API this
// program uses: it is not a part of today's build. Files that a run has written stay readable, so
// never write these again; add files of later commits beside them. To build it, check that commit
// out, copy this file and checkpoint_formula.hpp into a folder tests/golden there, append to its
// CMakeLists.txt
//
//   add_executable(make_checkpoint_golden tests/golden/make_checkpoint_golden.cpp)
//   target_link_libraries(make_checkpoint_golden PRIVATE ddp_pretrained ddp_models ddp)
//
// and configure with -DDDP_WITH_CUDA=OFF -DDDP_BUILD_TESTS=OFF -DDDP_BUILD_EXAMPLES=OFF. Then, in
// an empty folder (settings name folders relative to it):
//
//   make_checkpoint_golden one
//   mpirun -n 2 make_checkpoint_golden two
#include <torch/torch.h>

#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>

#include "checkpoint_formula.hpp"
#include "ddp/amp/grad_scaler.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/data/data_loader.hpp"
#include "ddp/optim/ema.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/train/checkpoint.hpp"
#include "ddp/train/config.hpp"
#include "models/pretrained/peft_adapter.hpp"

namespace {

using golden::Net;
using golden::Rows;

// That commit has no names in a Checkpointer's list.
class Named : public ddp::Stateful {
 public:
  Named(std::string name, ddp::Stateful& object) : name_(std::move(name)), object_(object) {}
  std::string state_name() const override { return name_; }
  ddp::StateDict state_dict() const override { return object_.state_dict(); }
  void load_state_dict(const ddp::StateDict& state) override { object_.load_state_dict(state); }

 private:
  std::string name_;
  ddp::Stateful& object_;
};

// A program's own object.
struct Own : ddp::Stateful {
  std::string state_name() const override { return "own"; }
  ddp::StateDict state_dict() const override { return state; }
  void load_state_dict(const ddp::StateDict& loaded) override { state = loaded; }
  ddp::StateDict state;
};

struct Numbers {
  static int64_t size() { return 22; }
  static ddp::Example get(int64_t index) {
    const auto number = at::scalar_tensor(index, at::kLong);
    return {number, number};
  }
};

ddp::DataLoader<Numbers> make_loader(const ddp::Config& cfg) {
  return {std::make_shared<Numbers>(), ddp::DistributedSampler(Numbers::size(), 0, 1, cfg.sampler),
          at::kCPU, cfg.loader};
}

ddp::AnyOptimizer lone_optimizer(ddp::OptimizerType type) {
  auto parameter = golden::lone_parameter().requires_grad_();
  parameter.mutable_grad() = golden::lone_gradient();
  auto optimizer = ddp::make_optimizer(
      ddp::NamedParameters{{"lone", parameter}},
      {.type = type, .momentum = 0.5, .beta1 = golden::kBeta1, .beta2 = golden::kBeta2, .eps = 0});
  optimizer.step(golden::kLr);
  return optimizer;
}

void draw_random_numbers(int rank) {
  torch::manual_seed(golden::kSeed + static_cast<uint64_t>(rank));
  torch::rand({3});
}

// SGD with everything that a program of one rank saves.
void save_sgd(const ddp::Context& ctx) {
  const char* const arguments[] = {"golden",
                                   "optimizer.type=sgd",
                                   "optimizer.momentum=0.5",
                                   "amp.dtype=fp16",
                                   "optimizer.weight_decay=0.25",
                                   "amp.init_scale=1024",
                                   "sampler.seed=5",
                                   "amp.growth_interval=2",
                                   "loader.batch_size=4",
                                   "checkpoint.dir=sgd"};
  const auto cfg = ddp::Config::from_command_line(std::size(arguments), arguments);
  Net net(at::kFloat);
  net->fill();
  ddp::DistributedDataParallel model(net, ctx.communicator());
  auto optimizer = ddp::make_optimizer(model, cfg.optimizer);
  ddp::Ema ema(model, {.decay = golden::kEmaDecay});
  ddp::GradScaler scaler(cfg.amp);
  auto loader = make_loader(cfg);
  auto same_loader = make_loader(cfg);
  for (int64_t step = 0; step < golden::kSgdSteps; ++step) {
    model.zero_grad();
    scaler.scale(model.forward(1.0)).backward();
    scaler.step(optimizer, golden::kLr);
    scaler.update();
    ema.update();
  }
  for (int batch = 0; batch < 8; ++batch) {  // six batches an epoch
    loader.next();
    same_loader.next();
  }
  Own own;
  own.state = golden::own_state(0);
  own.state.tensors["next_samples"] = same_loader.next().target;
  auto adam = lone_optimizer(ddp::OptimizerType::Adam);
  auto lars = lone_optimizer(ddp::OptimizerType::Lars);
  auto lamb = lone_optimizer(ddp::OptimizerType::Lamb);
  Named second("adam", adam), third("lars", lars), fourth("lamb", lamb);
  draw_random_numbers(0);
  ddp::Checkpointer checkpointer(
      ctx, cfg.checkpoint, {model, optimizer, ema, scaler, loader, own, second, third, fourth});
  checkpointer.set_text("note", "a text of the program");
  checkpointer.save(golden::kSgdSteps - 1, 0.1);
  checkpointer.wait();
}

// One step of AdamW over bfloat16 leaves with masters; the frozen weight is left out.
void save_adamw(const ddp::Context& ctx) {
  Net net(at::kBFloat16);
  net->fill();
  ddp::DistributedDataParallel model(net, ctx.communicator());
  model.leave_frozen_out_of_state();
  auto optimizer = ddp::make_optimizer(model, {.type = ddp::OptimizerType::AdamW,
                                               .weight_decay = golden::kWeightDecay,
                                               .beta1 = golden::kBeta1,
                                               .beta2 = golden::kBeta2,
                                               .eps = 0,
                                               .amsgrad = true});
  model.forward(1.0).backward();
  optimizer.step(golden::kLr);
  ddp::CheckpointOptions options;
  options.dir = "adamw";
  options.async = false;
  ddp::Checkpointer checkpointer(ctx, options, {model, optimizer});
  checkpointer.save(0);
  checkpointer.wait();
}

// One step of Adam with ZeRO over bfloat16 leaves: rank 0's gradients are the coefficients, rank
// 1's three times as much.
void save_zero(const ddp::Context& ctx) {
  Net net(at::kBFloat16);
  net->fill();
  ddp::DistributedDataParallel model(net, ctx.communicator());
  auto optimizer = ddp::make_optimizer(model, {.type = ddp::OptimizerType::Adam,
                                               .beta1 = golden::kBeta1,
                                               .beta2 = golden::kBeta2,
                                               .eps = 0,
                                               .zero1 = true});
  model.forward(1.0 + 2 * ctx.rank()).backward();
  optimizer.step(golden::kLr);
  Own own;
  own.state = golden::own_state(ctx.rank());
  draw_random_numbers(ctx.rank());
  ddp::CheckpointOptions options;
  options.dir = "zero";
  ddp::Checkpointer checkpointer(ctx, options, {model, optimizer, own});
  checkpointer.save(0);
  checkpointer.wait();
}

void save_adapter() {
  torch::nn::Module base;
  const auto q_proj = base.register_module("q_proj", models::Linear(6, 4, /*with_bias=*/true));
  const auto down_proj = base.register_module("down_proj", models::Linear(4, 6, false));
  const torch::NoGradGuard no_grad;
  const auto fill = [&] {
    for (int64_t salt = 0; auto& item : base.named_parameters()) {
      item.value().copy_(
          golden::filled(item.value().sizes(), [&](int64_t i) { return golden::value(i, salt); }));
      ++salt;
    }
  };
  fill();
  const auto identity = models::base_identity(base);
  models::add_lora(
      base, {.rank = 2, .alpha = 6, .dropout = 0.125, .target_modules = {"q_proj", "down_proj"}});
  int64_t salt = 40;
  for (const auto& layer : {q_proj, down_proj}) {
    for (const auto& matrix : {layer->lora_a, layer->lora_b}) {
      matrix.copy_(
          golden::filled(matrix.sizes(), [&](int64_t i) { return golden::value(i, salt); }));
      ++salt;
    }
  }
  models::save_adapter(base, "adapter", "a/base", identity);
}

// Twice the backwards that a measurement takes.
void train_rows(const ddp::Context& ctx, const std::vector<int64_t>& sizes) {
  ddp::DdpOptions options;
  options.bucket_cap_mb = ddp::kAutoBuckets;
  ddp::DistributedDataParallel model(Rows(sizes), ctx.communicator(), options);
  for (int step = 0; step < 6; ++step) {
    model.zero_grad();
    model.forward().backward();
  }
  if (!model.logging_data().has_rebuilt_buckets) {
    throw std::runtime_error("the buckets were not chosen");
  }
}

ddp::Context make_context(const std::string& plan_file) {
  ddp::ContextOptions options;
  options.device = "cpu";
  options.plan_file = plan_file;
  return ddp::Context::create(options);
}

void write_one() {
  auto ctx = make_context("plan_of_one_rank.json");
  ctx.plan().set("kernels", golden::kGivenKernels);
  save_sgd(ctx);
  save_adamw(ctx);
  save_adapter();
  ctx.close();
}

void write_two() {
  auto ctx = make_context("plan_of_two_ranks.json");
  ctx.plan().set("kernels", golden::kGivenKernels);
  ctx.plan().set(golden::kGivenBuckets, golden::kGivenChoice);
  train_rows(ctx, golden::kMeasuredRows);
  train_rows(ctx, golden::kGivenRows);
  save_zero(ctx);
  ctx.close();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string part = argc == 2 ? argv[1] : "";
  if (part != "one" && part != "two") {
    std::fprintf(stderr, "usage: %s one | mpirun -n 2 %s two\n", argv[0], argv[0]);
    return 64;
  }
  part == "one" ? write_one() : write_two();
  return 0;
}
