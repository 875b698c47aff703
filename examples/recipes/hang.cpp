// SPDX-License-Identifier: Apache-2.0
// Ranks with different numbers of batches: the classic hang of data-parallel programs.
//
//   mpirun -n 2 build/examples/recipes/hang                 # ends with code 70 and names the ranks
//   mpirun -n 2 build/examples/recipes/hang loop.join=true  # the cure
#include <torch/torch.h>

#include "ddp/ddp.hpp"

namespace {

struct LoopSettings {
  bool join = false;
};
void describe_fields(LoopSettings& settings, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "join", .doc = "Ranks without batches join the others' reductions."},
                settings.join);
}

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  torch::nn::Linear module(4, 1);
  module->to(ctx.device());
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  auto optimizer = ddp::make_optimizer(model, cfg.optimizer);
  // The mistake: seven samples without padding. Of two ranks, rank 0 gets four, rank 1 three.
  ddp::DistributedSampler sampler(7, ctx.communicator(), {.pad = false});
  int64_t step = 0;
  const auto loop = [&] {
    for (const auto index : sampler.indices()) {
      ctx.set_progress(step++, "training");  // shown in messages; Metrics::end_step does it too
      model.zero_grad();
      model.forward(torch::full({1, 4}, index, ctx.device()).to(torch::kFloat)).mean().backward();
      optimizer->step(0.01);
    }
  };
  if (cfg.section<LoopSettings>("loop").join) {
    ddp::join(model, loop);
  } else {
    loop();  // the backward of rank 0's fourth step waits for rank 1, which has left
  }
  ddp::log_info("done after " + std::to_string(step) + " steps");
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train, {ddp::declare_section<LoopSettings>("loop")});
}
