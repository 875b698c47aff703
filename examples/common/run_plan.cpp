// SPDX-License-Identifier: Apache-2.0
#include "common/run_plan.hpp"

#include "common/training_loop.hpp"

namespace examples {

RunPlan plan_run(ddp::Config& cfg, const ddp::Context& ctx, int64_t batches_per_epoch) {
  require_equal_batches(batches_per_epoch, ctx.control_plane());
  const int64_t batch = cfg.loader.global_batch_size > 0 ? cfg.loader.global_batch_size
                                                         : cfg.loader.batch_size * ctx.world_size();
  RunPlan plan;
  plan.epoch = {.steps = steps_per_epoch(batches_per_epoch, cfg.train.grad_accum_steps),
                .samples_per_step = batch * cfg.train.grad_accum_steps};
  plan.num_steps = cfg.train.num_steps(plan.epoch.steps);
  cfg.metrics.run.max_steps = plan.num_steps;
  cfg.metrics.run.steps_per_epoch = plan.epoch.steps;
  if (cfg.lr_schedule.total_steps == 0) {
    cfg.lr_schedule.total_steps = plan.num_steps;
  }
  return plan;
}

ddp::LoaderOptions eval_loader_options(const ddp::Config& cfg) {
  auto options = cfg.loader;
  options.drop_last = false;
  options.global_batch_size = 0;
  if (cfg.train.eval_batch_size > 0) {
    options.batch_size = cfg.train.eval_batch_size;
  }
  return options;
}

}  // namespace examples
