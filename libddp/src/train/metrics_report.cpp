// SPDX-License-Identifier: Apache-2.0
// Reports the metrics: log lines, rows of CSV and JSONL.
#include "ddp/core/logging.hpp"
#include "train/metrics_impl.hpp"

namespace ddp::detail {
namespace {

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

void MetricsImpl::log_step(int64_t step, const StepMetrics& metrics) {
  const auto grad_norm = fetch(metrics);
  auto own = numbers_since(at_log_);
  own.exposed_comm_ms = exposed_comm ? exposed_comm() : NAN;
  at_log_ = now_;
  const auto job = gather(own, /*to_all=*/false);
  if (!is_main()) {
    return;
  }
  last_step_ms_ = job.step_ms();
  last_loss_ = job.loss();
  const LoggedNumbers numbers{
      .step = step + 1,
      .epoch = epochs_at(step),
      .loss = job.loss(),
      .accuracy = job.accuracy(),
      .lr = metrics.lr,
      .grad_norm = grad_norm,
      .step_ms = if_measured(job.step_ms()),
      .samples_per_second = if_measured(job.samples_per_second()),
      .samples_per_second_per_rank = if_measured(job.samples_per_second() / job.world_size),
      .exposed_comm_ms = if_measured(job.total.exposed_comm_ms),
      .loader_wait_ms = if_measured(job.total.loader_wait_ms),
      .peak_memory_gib = if_measured(job.total.memory_gib),
      .interval_seconds = job.total.seconds,
      .energy_j = if_measured(job.total.energy_j),
      .sample_unit = options_.run.sample_unit};
  if (options_.progress != "off") {
    clear_bar();
    log_info(log_line(numbers, options_.run.max_steps, eta_seconds(step)));
  }
  const auto row = step_row(numbers, unix_time());
  if (options_.csv) {
    folder_.append("steps.csv", csv_line(row), csv_header(row));
  }
  if (options_.jsonl) {
    folder_.append("steps.jsonl", json_line(row));
  }
}

double MetricsImpl::eta_seconds(int64_t step) const {
  return static_cast<double>(options_.run.max_steps - step - 1) * last_step_ms_ / 1000;
}

std::optional<double> MetricsImpl::epochs_at(int64_t step) const {
  const auto length = static_cast<double>(options_.run.steps_per_epoch);
  return length > 0 ? std::optional(static_cast<double>(step + 1) / length) : std::nullopt;
}

void MetricsImpl::add_evaluation(int64_t step, const EpochMetrics& metrics) {
  if (!is_main()) {
    return;
  }
  if (options_.progress != "off") {
    clear_bar();
    log_info(evaluation_line(step + 1, options_.run.max_steps, metrics.test_loss,
                             metrics.test_accuracy));
  }
  const Row row = {{.name = "step", .integer = step + 1},
                   {.name = "epoch", .number = epochs_at(step)},
                   {.name = "eval_loss", .number = metrics.test_loss},
                   {.name = "eval_accuracy", .number = metrics.test_accuracy},
                   {.name = "time", .number = unix_time()}};
  if (options_.csv) {
    folder_.append("evals.csv", csv_line(row), csv_header(row));
  }
  if (options_.jsonl) {
    folder_.append("evals.jsonl", json_line(row));
  }
}

EpochResult MetricsImpl::end_epoch(int64_t epoch, const EpochMetrics& metrics) {
  fetch({});
  auto own = numbers_since(at_epoch_);
  own.utilisation = utilisation_samples_ > 0 ? utilisation_sum_ / utilisation_samples_ : NAN;
  const double wall = std::chrono::duration<double>(Clock::now() - epoch_wall_).count();
  const double energy = gpu_numbers().energy_joules;
  own.power_w = std::isnan(energy) && gpu_ ? gpu_->power_watts() : (energy - epoch_energy_) / wall;
  const auto job = gather(own, /*to_all=*/true);
  at_epoch_ = at_log_ = now_;
  utilisation_sum_ = 0;
  utilisation_samples_ = 0;
  epoch_energy_ = energy;
  epoch_wall_ = Clock::now();
  if (is_main() && options_.csv) {
    const auto row = epoch_row(epoch, metrics, job);
    folder_.append("epochs.csv", csv_line(row), csv_header(row));
  }
  return {.train_loss = job.loss(),
          .train_accuracy = job.accuracy(),
          .seconds = job.total.seconds,
          .samples_per_second = job.samples_per_second()};
}

Row MetricsImpl::epoch_row(int64_t epoch, const EpochMetrics& metrics,
                           const JobNumbers& job) const {
  const auto& run = options_.run;
  const int64_t batch =
      run.global_batch_size > 0 ? run.global_batch_size : run.batch_size_per_rank * job.world_size;
  const auto rate_name = run.sample_unit + "_per_second";
  const auto if_known = [](int64_t known, double number) {
    return known > 0 ? std::optional(number) : std::nullopt;
  };
  return {{.name = "job_id", .text = launch_.job_id},
          {.name = "commit", .text = commit_},
          {.name = "gpu_type",
           .text = gpu_                ? gpu_->name()
                   : device_.is_cuda() ? ""
                                       : "cpu"},
          {.name = "nodes", .integer = launch_.num_nodes},
          {.name = "gpus", .integer = device_.is_cuda() ? job.world_size : 0},
          {.name = "ranks", .integer = job.world_size},
          {.name = "precision", .text = run.precision},
          {.name = "global_batch_size", .integer = batch > 0 ? std::optional(batch) : std::nullopt},
          {.name = "batch_size_per_gpu",  // a fraction if ranks share the batch unevenly
           .number = if_known(batch, static_cast<double>(batch) / job.world_size)},
          {.name = "bucket_cap_mb", .number = if_known(run.bucket_cap_mb > 0, run.bucket_cap_mb)},
          {.name = "repeat", .integer = options_.repeat},
          {.name = "steps_per_epoch",
           .integer = run.steps_per_epoch > 0 ? std::optional(run.steps_per_epoch) : std::nullopt},
          {.name = "epoch", .integer = epoch},
          {.name = "train_loss", .number = job.loss()},
          {.name = "train_accuracy", .number = job.accuracy()},
          {.name = "test_loss", .number = metrics.test_loss},
          {.name = "test_accuracy", .number = metrics.test_accuracy},
          {.name = "epoch_seconds", .number = job.total.seconds},
          {.name = rate_name, .number = if_measured(job.samples_per_second())},
          {.name = "gpu_utilisation_percent", .number = if_measured(job.total.utilisation)},
          {.name = "power_w", .number = if_measured(job.total.power_w)},
          {.name = "memory_gib", .number = if_measured(job.total.memory_gib)},
          {.name = "energy_j", .number = if_measured(job.total.energy_j)},
          {.name = "time", .number = unix_time()}};
}

}  // namespace ddp::detail
