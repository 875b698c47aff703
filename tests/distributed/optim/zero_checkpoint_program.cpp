// SPDX-License-Identifier: Apache-2.0
// Saves, and loads with other ranks, the state of a model (zero_checkpoint_test.py).
//
//   train  trains train.max_steps steps, then saves in checkpoint.dir
//   copy   restores from checkpoint.dir, and saves the same step in program.copy_to
// Each rank prints the memory that the save took.
#include <malloc.h>
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "ddp/ddp.hpp"

namespace {

struct ProgramSettings {
  std::string copy_to = "";    ///< folder of the copy; empty: train
  int64_t elements = 1 << 12;  ///< of the largest weight
  bool half = false;           ///< bfloat16 parameters
};
void describe_fields(ProgramSettings& settings, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "copy_to", .doc = "Folder of the copy. Empty: train."}, settings.copy_to);
  visitor.field({.name = "elements", .doc = "Elements of the largest weight."}, settings.elements);
  visitor.field({.name = "half", .doc = "bfloat16 parameters."}, settings.half);
}

// In MiB: a line of /proc/self/status.
double memory_of_process(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(name + ":")) {
      return std::stod(line.substr(name.size() + 1)) / 1024;
    }
  }
  return 0;
}

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const ProgramSettings& settings) {
    const auto dtype = settings.half ? torch::kBFloat16 : torch::kFloat;
    const auto add = [&](const char* name, at::IntArrayRef shape) {
      return register_parameter(name, (0.1 * torch::randn(shape)).to(dtype));
    };
    large = add("large", {settings.elements / 8, 8});
    turned = register_parameter(
        "turned", torch::randn({3, 5, 3, 3}).to(dtype).contiguous(at::MemoryFormat::ChannelsLast));
    bias = add("bias", {7});
    scalar = add("scalar", {});
    frozen = add("frozen", {4});
    frozen.set_requires_grad(false);
  }
  torch::Tensor forward(const torch::Tensor& factor) {
    auto loss = (factor * frozen.sum()).to(torch::kFloat);
    for (const auto& weight : {large, turned, bias, scalar}) {
      loss = loss + (factor * weight.to(torch::kFloat)).square().mean();
    }
    return loss;
  }
  torch::Tensor large, turned, bias, scalar, frozen;
};
TORCH_MODULE(Net);

void save(ddp::Checkpointer& checkpointer, int64_t step, int rank) {
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << "5";  // resets the peak
  const double before = memory_of_process("VmRSS");
  checkpointer.save(step);
  std::printf("rank %d: the save took %.1f MiB\n", rank, memory_of_process("VmHWM") - before);
}

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  const auto settings = cfg.section<ProgramSettings>("program");
  torch::manual_seed(5);
  Net module(settings);
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  auto optimizer = ddp::make_optimizer(model, cfg.optimizer);
  ddp::Checkpointer checkpointer(ctx, cfg.checkpoint, {model, optimizer});
  auto step = checkpointer.restore();
  if (!settings.copy_to.empty()) {
    auto options = cfg.checkpoint;
    options.dir = settings.copy_to;
    ddp::Checkpointer copy(ctx, options, {model, optimizer});
    save(copy, step - 1, ctx.rank());
    return;
  }
  for (; step < cfg.train.max_steps; ++step) {
    model.zero_grad();
    model.forward(torch::full({}, 1.0 + 0.1 * static_cast<double>(step + ctx.rank()))).backward();
    optimizer->step(0.01);
  }
  save(checkpointer, step - 1, ctx.rank());
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(
      argc, argv, train,
      {ddp::uses({"train.max_steps"}), ddp::declare_section<ProgramSettings>("program")});
}
