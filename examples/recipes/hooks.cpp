// SPDX-License-Identifier: Apache-2.0
// Own code at the five points of a training loop: step, evaluation, checkpoint, stop, failure.
//
//   mpirun -n 2 build/examples/recipes/hooks checkpoint.dir=runs/hooks train.max_steps=100000
//     loop.stop_after=30
//   mpirun -n 2 build/examples/recipes/hooks loop.fail_at=20
#include <torch/torch.h>

#include "ddp/ddp.hpp"

namespace {

struct LoopSettings {
  int64_t stop_after = -1;
  int64_t fail_at = -1;
};
void describe_fields(LoopSettings& settings, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "stop_after", .doc = "Ask for a stop after this step. -1: never."},
                settings.stop_after);
  visitor.field({.name = "fail_at", .doc = "Rank 0 throws in this step. -1: never."},
                settings.fail_at);
}

// Checkpoint, on rank 0: copy the folder, or point a link to it.
void after_save(int64_t steps_done, const std::string& folder) {
  ddp::log_info(ddp::concat("after the save of ", steps_done, " steps: ", folder));
}

// Stop, on all ranks, after the save: write files of your own. The job will be killed soon.
void before_stop(int64_t steps_done) {
  ddp::log_info(ddp::concat("before the stop after ", steps_done, " steps"));
}

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  const auto settings = cfg.section<LoopSettings>("loop");
  torch::nn::Linear module(4, 1);
  module->to(ctx.device());
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  auto optimizer = ddp::make_optimizer(model, cfg.optimizer);
  ddp::Checkpointer checkpointer(ctx, cfg.checkpoint, {model, optimizer});

  checkpointer.set_after_save(after_save);
  checkpointer.set_before_stop(before_stop);

  for (auto step = checkpointer.restore(); step < cfg.train.max_steps; ++step) {
    ctx.set_progress(step, "training");  // shown in messages; Metrics::end_step does it too
    const auto x = torch::randn({8, 4}, ctx.device());
    model.zero_grad();
    const auto loss = (model.forward(x) - x.sum(1, true)).square().mean();
    loss.backward();
    optimizer->step(0.05);

    // Step: the loop is your own, so put any code here.
    if (step == settings.fail_at && ctx.is_main()) {
      throw std::runtime_error("sample 17 is broken");
    }
    if (step == settings.stop_after) {
      ddp::request_stop();  // as SIGTERM; one rank is enough
    }
    // Evaluation: the same. All ranks take the same branch if it calls collectives.
    if ((step + 1) % 500 == 0 && ctx.is_main()) {
      ddp::log_info(ddp::concat("evaluation: the weights sum to ",
                                module->weight.sum().item<double>(), ", 4 is right"));
    }
    checkpointer.save_if_due(step);
  }
  checkpointer.save(cfg.train.max_steps - 1);
  checkpointer.wait();  // calls set_after_save's function for the last checkpoint
}

void train_and_report(ddp::Context& ctx, const ddp::Config& cfg) {
  try {
    train(ctx, cfg);
  } catch (const ddp::Stop&) {
    throw;  // not a failure
  } catch (const std::exception& error) {
    // Failure, on each rank that throws: no collectives here, because other ranks may be elsewhere.
    ddp::log_error(ddp::concat("report of rank ", ctx.rank(), ": ", error.what()));
    throw;  // without it the job ends as a deadlock (70), and the cause is lost
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train_and_report, {ddp::declare_section<LoopSettings>("loop")});
}
