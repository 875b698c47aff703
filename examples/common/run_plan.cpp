// SPDX-License-Identifier: Apache-2.0
#include "common/run_plan.hpp"

#include <algorithm>

#include "ddp/core/error.hpp"

namespace examples {

using ddp::concat;

int64_t plan_run(ddp::Config& cfg, const ddp::Context& ctx, int64_t batches_per_epoch) {
  require_equal_batches(batches_per_epoch, ctx.control_plane());
  const auto num_steps =
      cfg.train.num_steps(steps_per_epoch(batches_per_epoch, cfg.train.grad_accum_steps));
  if (cfg.lr_schedule.total_steps == 0) {
    cfg.lr_schedule.total_steps = num_steps;
  }
  const auto batch_size = cfg.loader.global_batch_size > 0
                              ? cfg.loader.global_batch_size
                              : cfg.loader.batch_size * ctx.world_size();
  cfg.checkpoint.samples_per_step = batch_size * cfg.train.grad_accum_steps;
  cfg.checkpoint.same_steps = true;
  return cfg.checkpoint.resume == ddp::Resume::Best ? 0 : num_steps;
}

ddp::CheckpointOptions reading_options(ddp::CheckpointOptions options) {
  options.read_only = true;
  if (options.resume != ddp::Resume::Best) {
    options.resume = ddp::Resume::Require;
  }
  return options;
}

ddp::LoaderOptions eval_loader_options(const ddp::Config& cfg) {
  auto options = ddp::eval_loader_options(cfg.loader);
  if (cfg.train.eval_batch_size > 0) {
    options.batch_size = cfg.train.eval_batch_size;
  }
  return options;
}

int64_t steps_per_epoch(int64_t batches_per_epoch, int64_t grad_accum_steps) {
  return std::max<int64_t>(1, (batches_per_epoch + grad_accum_steps - 1) / grad_accum_steps);
}

StepSchedule::StepSchedule(const ddp::TrainOptions& train, int64_t batches_per_epoch,
                           int64_t num_steps, int64_t log_every)
    : grad_accum_steps_(train.grad_accum_steps),
      eval_every_(train.eval_every),
      eval_every_steps_(train.eval_every_steps),
      batches_per_epoch_(batches_per_epoch),
      steps_per_epoch_(examples::steps_per_epoch(batches_per_epoch, train.grad_accum_steps)),
      num_steps_(num_steps),
      log_every_(log_every) {}

int64_t StepSchedule::first_batch(int64_t step) const {
  return step % steps_per_epoch_ * grad_accum_steps_;
}

int64_t StepSchedule::num_batches(int64_t step) const {
  return std::clamp<int64_t>(batches_per_epoch_ - first_batch(step), 1, grad_accum_steps_);
}

bool StepSchedule::is_logged(int64_t step) const {
  return log_every_ > 0 && (step + 1) % log_every_ == 0;
}

bool StepSchedule::ends_epoch(int64_t step) const {
  return is_last(step) || (step + 1) % steps_per_epoch_ == 0;
}

bool StepSchedule::evaluates_after(int64_t step) const {
  if (eval_every_steps_ > 0) {
    return is_last(step) || (step + 1) % eval_every_steps_ == 0;
  }
  return ends_epoch(step) && eval_every_ > 0 &&
         (is_last(step) || (epoch_of(step) + 1) % eval_every_ == 0);
}

void stop_beside_training(const ddp::Config& cfg, const std::string& who, const std::string& work) {
  const auto what = concat(who, ": stopped while ", work);
  if (cfg.checkpoint.dir.empty()) {
    throw ddp::Error(ddp::ExitCode::UserException,
                     what +
                         ", and no checkpoint was saved because checkpoint.dir is empty; fix: "
                         "set checkpoint.dir to a folder that all ranks see");
  }
  throw ddp::Stop(concat(what, ", which changes nothing in ", cfg.checkpoint.dir));
}

void require_equal_batches(int64_t batches_per_epoch, ddp::ControlPlane& control_plane) {
  const auto counts = control_plane.all_gather_numbers({batches_per_epoch});
  const auto other = std::find_if(counts.begin(), counts.end(),
                                  [&](const auto& count) { return count != counts[0]; });
  if (other != counts.end()) {
    throw ddp::SettingsError(
        concat("sampler.pad=false gives rank 0 ", counts[0].at(0),
               " training batches per epoch and rank ", other - counts.begin(), " ", other->at(0),
               ", but every rank needs the same number; fix: sampler.pad=true, "
               "or sampler.drop_last=true"));
  }
}

void require_same_classes(const ddp::Dataset& train, const ddp::Dataset& test) {
  const auto of_train = train.class_names(), of_test = test.class_names();
  if (of_train.empty() || of_test.empty() || of_train == of_test) {
    return;
  }
  std::size_t i = 0;
  while (i < of_train.size() && i < of_test.size() && of_train[i] == of_test[i]) {
    ++i;
  }
  const auto name = [i](const std::vector<std::string>& names) {
    return i < names.size() ? "'" + names[i] + "'" : std::string("missing");
  };
  throw ddp::DataError(
      concat("the splits number their classes differently: class ", i, " is ", name(of_train),
             " in the training data and ", name(of_test),
             " in the test data; fix: data.path must hold the same classes in both splits "
             "(tar shards: the same classes.txt)"));
}

}  // namespace examples
