// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/metrics.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>

#include "comm/job/context_handle.hpp"
#include "core/control/doctor/job_report.hpp"
#include "core/control/rank_position.hpp"
#include "core/control/wire/message_codec.hpp"
#include "core/control/wire/tcp_socket.hpp"
#include "core/log/log_file.hpp"
#include "ddp/core/logging.hpp"
#include "train/metrics/metrics_impl.hpp"
#include "train/program/help_version.hpp"

namespace ddp {
namespace detail {

using SteadyClock = std::chrono::steady_clock;

namespace {

/// The sums of MetricsImpl::losses_, in the order in which add_losses() adds them.
enum LossSum : std::size_t { kLossSum, kCorrectSum, kNumLossSums };

/// Removes the metric of that name; nothing if there is none.
std::optional<double> take_out(std::vector<CustomResult>& results, const std::string& name) {
  const auto found = std::find_if(results.begin(), results.end(),
                                  [&](const CustomResult& result) { return result.name == name; });
  if (found == results.end()) {
    return std::nullopt;
  }
  const auto value = found->value;
  results.erase(found);
  return value;
}

std::optional<double> read_value(const std::string& name, const MetricValue& value) {
  if (value.tensor.defined()) {
    check_one_element(name, value.tensor);
    return value.tensor.item<double>();
  }
  return value.logged.has_value() ? std::optional(value.logged.value()) : value.number;
}

void log_stragglers(const Stragglers::Messages& messages) {
  constexpr std::size_t kMaxLines = 4;
  for (std::size_t i = 0; i < std::min(kMaxLines, messages.warnings.size()); ++i) {
    log_warning(messages.warnings[i]);
  }
  if (messages.warnings.size() > kMaxLines) {
    log_warning(concat(messages.warnings.size() - kMaxLines,
                       " more ranks have become slow: ranks.json of the run folder has them"));
  }
  for (const auto& info : messages.infos) {
    log_info(info);
  }
}

void check_count(const char* field, int64_t count) {
  if (count < 0) {
    throw SettingsError(concat("StepMetrics::", field, "=", count,
                               " must be 0 or more; fix: give this rank's number in the step"));
  }
}

std::vector<CustomResult> results_of(const std::map<std::string, double>& values) {
  std::vector<CustomResult> results;
  for (const auto& [name, value] : values) {
    results.push_back({.name = name, .value = value});
  }
  return results;
}

}  // namespace

MetricsImpl::MetricsImpl(ControlPlane& control_plane, at::Device device,
                         const LaunchEnvironment& launch, const MetricsOptions& options,
                         std::function<void(int64_t step)> set_progress)
    : control_plane_(control_plane),
      device_(device),
      options_(options),
      set_progress_(std::move(set_progress)),
      files_(options, launch, is_main()),
      losses_(device),
      custom_(device, column_names(step_row({.sample_unit = options.run.sample_unit}, 0))),
      custom_of_epoch_(device, files_.columns_of_epochs()),
      sensors_(pci_bus_id(device), SteadyClock::now()),
      place_{.host = host_name(),
             .name = device.str(),
             .type = sensors_.gpu_name(),
             .pci_bus_id = pci_bus_id(device)},
      loader_wait_(StepWait::total_of_batches()),
      reduction_wait_(StepWait::read_all(WaitKind::Reductions)),
      flops_(options.run.peak_tflops),
      console_(options, is_main()) {
  options.usage.set();
  if (options_.nvtx) {
    enable_nvtx();
  }
  make_tracer(0);
  if (!folder().empty()) {
    append_log_to(folder() + "/log.txt");
    set_report_file(folder() + "/doctor.json");
  }
  if (is_main() && !options_.run.settings_text.empty()) {
    files_.write_settings(options_.run.settings_text);
  }
  if (files_.is_first_start()) {
    write_run();
  }  // else the first step does: a start without a step must not replace a run's constants
}

void MetricsImpl::write_run() {
  if (folder().empty()) {
    return;
  }
  files_.write_run({.ranks = control_plane_.world_size(),
                    .gpu_type = device_.is_cuda() ? sensors_.gpu_name() : "cpu",
                    .uses_gpus = device_.is_cuda()},
                   {.host = place_.host,
                    .device = device_.is_cuda() ? "cuda" : "cpu",
                    .num_steps = num_steps_,
                    .steps_per_epoch = steps_per_epoch_,
                    .flops_per_sample = flops_.per_sample(),
                    .peak_tflops = flops_.peak_tflops(),
                    .versions = version_text()});
}

void MetricsImpl::set_flops_per_sample(double flops) {
  flops_.set(flops);
  if (clock_.has_started()) {
    write_run();  // otherwise the first step writes it
  }
}

void MetricsImpl::make_tracer(int64_t next_step) {
  tracer_.reset();  // before the next tracer records
  if (options_.trace_steps > 0) {
    const auto path = folder().empty() ? std::string("trace.json") : folder() + "/trace.json";
    tracer_ = std::make_unique<Tracer>(control_plane_, device_, path, options_.trace_first_step,
                                       options_.trace_steps, next_step);
  }
}

void MetricsImpl::begin(int64_t first_step, int64_t num_steps, int64_t steps_per_epoch) {
  if (num_steps > 0) {
    num_steps_ = num_steps;
    console_.set_max_steps(num_steps);
  }
  if (steps_per_epoch > 0) {
    steps_per_epoch_ = steps_per_epoch;
  }
  if (first_step > 0) {
    make_tracer(first_step);
  }
  set_progress_(first_step);
}

void MetricsImpl::wait_for_device() const {
  if (!device_.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    guard.synchronizeStream(guard.getStream(device_));
  }
}

void MetricsImpl::pause() {
  if (!clock_.is_paused()) {
    wait_for_device();
    read_loader_wait();
    flops_.set_paused(true);
  }
  clock_.pause(SteadyClock::now(), sensors_.energy_joules());
}

void MetricsImpl::resume() {
  clock_.resume(SteadyClock::now(), sensors_.energy_joules());
  if (!clock_.is_paused()) {
    read_loader_wait(/*counts=*/false);
    flops_.set_paused(false);
  }
}

double MetricsImpl::read_exposed_comm_ms() {
  return exposed_comm_
             ? exposed_comm_()
             : reduction_wait_.read(StepWait::read_all(WaitKind::Reductions)).value_or(NAN);
}

void MetricsImpl::read_loader_wait(bool counts) {
  loader_wait_.read(own_loader_wait_ ? StepWait::Total{own_loader_wait_(), /*has_loader=*/true}
                                     : StepWait::total_of_batches(),
                    counts);
}

void MetricsImpl::log(const std::string& name, const MetricValue& value,
                      const LogOptions& options) {
  // The first step's time is not measured, so a rate leaves out its values too.
  const bool counts = options.reduction != MetricReduction::Rate || clock_.has_started();
  custom_.add(name, counts ? value : MetricValue(), options);
}

void MetricsImpl::log_epoch(const std::string& name, const MetricValue& value,
                            const LogOptions& options) {
  if (options.reduction == MetricReduction::Rate) {
    throw SettingsError(concat("metric \"", name, "\" of an epoch cannot be a rate, because an ",
                               "evaluation is not timed; fix: log its own number a second"));
  }
  custom_of_epoch_.add(name, value, options);
}

void MetricsImpl::add_losses(const StepMetrics& metrics) {
  check_count("num_samples", metrics.num_samples);
  check_count("num_targets", metrics.num_targets.value_or(0));
  const auto n = static_cast<double>(metrics.num_targets.value_or(metrics.num_samples));
  losses_.add("loss", metrics.loss, {.weight = n});
  losses_.add("num_correct", metrics.num_correct, {.reduction = MetricReduction::Sum, .weight = n});
}

void MetricsImpl::end_step(int64_t step, const StepMetrics& metrics) {
  if (options_.log_every > 0 && control_plane_.world_size() > 1) {
    refuse_in_uneven_loop("metrics");  // at the first step, not after log_every of them
  }
  files_.begin(step);
  steps_done_ = step + 1;
  ++steps_in_epoch_;
  add_losses(metrics);
  custom_.poll();
  custom_of_epoch_.poll();
  counter_.add_step(metrics.num_samples, /*timed=*/clock_.has_started());
  if (!clock_.has_started()) {
    write_run();  // the first step has used the sections of the settings that this run uses
    clock_.start(SteadyClock::now(), sensors_.energy_joules());
    read_loader_wait();
    counter_.begin_loader_wait(loader_wait_.milliseconds().value_or(0));
  }
  if (flops_.end_step(metrics.num_samples, place_.type)) {
    write_run();
    if (is_main() && flops_.peak_tflops()) {
      log_info(flops_.text(options_.run.sample_unit));
    }
  }
  set_progress_(step + 1);
  const bool last = num_steps_ > 0 && step + 1 == num_steps_;
  const bool logs = options_.log_every > 0 && ((step + 1) % options_.log_every == 0 || last);
  if (last) {
    console_.clear_bar();
  }
  if (logs) {
    log_step(step, metrics);
  }
  if (!last) {
    console_.draw_bar(step + 1, logs);  // after the line: both show the same time left
  }
  if (tracer_) {
    tracer_->end_step(step);
  }
}

void MetricsImpl::read() {
  LossSums losses;
  const auto sums = losses_.take();  // empty before the first step
  if (sums.size() == kNumLossSums) {
    losses = {.loss_sum = sums[kLossSum].value,
              .correct = sums[kCorrectSum].value,
              .loss_samples = sums[kLossSum].weight,
              .correct_samples = sums[kCorrectSum].weight};
  }
  wait_for_device();
  RankCounter::Reading reading{.losses = losses};
  reading.seconds = clock_.seconds(SteadyClock::now());
  reading.energy_j = clock_.joules(sensors_.energy_joules());
  if (!clock_.is_paused()) {  // else pause() has read it
    read_loader_wait();
  }
  reading.loader_wait_ms = loader_wait_.milliseconds();
  counter_.read(reading);
  sensors_.sample_utilisation();
}

std::vector<RankNumbers> MetricsImpl::gather(RankNumbers own, bool to_all) {
  own.memory_gib = used_memory_gib(device_);
  const ActivityScope activity(control_plane_, "metrics");
  return to_all ? all_gather_messages(control_plane_, own) : gather_messages(control_plane_, own);
}

void MetricsImpl::log_step(int64_t step, const StepMetrics& metrics) {
  read();
  const auto grad_norm = read_value("grad_norm", metrics.grad_norm);  // may throw, on any rank
  auto own = counter_.since_log();
  own.exposed_comm_ms = read_exposed_comm_ms();
  own.custom = custom_.take();
  own.device = place_;
  own.device->numbers = sensors_.latest();
  counter_.end_log();
  const auto ranks = gather(own, /*to_all=*/false);
  const JobNumbers job(ranks);
  if (!is_main()) {
    return;
  }
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
      .tflops_per_rank = tflops_per_rank(job),
      .mfu = mfu(job),
      .exposed_comm_ms = if_measured(job.total.exposed_comm_ms),
      .loader_wait_ms = if_measured(job.total.loader_wait_ms),
      .peak_memory_gib = if_measured(job.total.memory_gib),
      .interval_seconds = job.total.seconds,
      .energy_j = if_measured(job.total.energy_j),
      .custom = job.custom,
      .sample_unit = options_.run.sample_unit};
  console_.log_step(numbers);
  files_.add_step(numbers);
  log_stragglers(stragglers_.add(step + 1, ranks));
  files_.write_ranks(step + 1, num_steps_, ranks, stragglers_.ranks());
}

std::optional<double> MetricsImpl::tflops_per_rank(const JobNumbers& job) const {
  const double rate = job.samples_per_second() / job.world_size;
  return if_measured(1e-12 * rate * flops_.per_sample().value_or(NAN));
}

std::optional<double> MetricsImpl::mfu(const JobNumbers& job) const {
  const auto tflops = tflops_per_rank(job);
  return tflops && flops_.peak_tflops() ? std::optional(*tflops / *flops_.peak_tflops())
                                        : std::nullopt;
}

std::optional<double> MetricsImpl::epochs_at(int64_t step) const {
  const auto length = static_cast<double>(steps_per_epoch_);
  return length > 0 ? std::optional(static_cast<double>(step + 1) / length) : std::nullopt;
}

void MetricsImpl::add_evaluation(int64_t step, const EpochMetrics& metrics) {
  if (!is_main()) {
    return;
  }
  const EvaluationNumbers numbers{.done = step + 1,
                                  .epoch = epochs_at(step),
                                  .loss = metrics.test_loss,
                                  .accuracy = metrics.test_accuracy,
                                  .custom = results_of(metrics.custom)};
  evaluated_steps_ = numbers.done;
  if (numbers.done == 0) {
    files_.begin(0);
  }
  console_.log_evaluation(numbers);
  files_.add_evaluation(numbers);
}

EpochResult MetricsImpl::end_epoch(int64_t epoch, const EpochMetrics& given) {
  read();
  auto own = counter_.since_epoch();
  const auto use = sensors_.end_epoch(SteadyClock::now());
  own.utilisation = use.utilisation;
  own.power_w = use.power_w;
  own.custom = custom_of_epoch_.take();
  JobNumbers job(gather(own, /*to_all=*/true));
  std::map<std::string, double> custom_results;
  for (const CustomResult& result : job.custom) {
    if (result.value) {
      custom_results[result.name] = *result.value;
    }
  }
  EpochMetrics metrics = given;
  if (const auto loss = take_out(job.custom, "test_loss")) {
    metrics.test_loss = loss;
  }
  if (const auto accuracy = take_out(job.custom, "test_accuracy")) {
    metrics.test_accuracy = accuracy;
  }
  for (const CustomResult& result : results_of(given.custom)) {
    job.custom.push_back(result);
  }
  counter_.end_epoch();
  sensors_.begin_epoch(SteadyClock::now());
  if (is_main()) {
    files_.add_epoch({.epoch = epoch,
                      .steps_done = steps_done_,
                      .num_steps = steps_per_epoch_,
                      .num_steps_in_row = std::exchange(steps_in_epoch_, 0),
                      .gpu_type = device_.is_cuda() ? sensors_.gpu_name() : "cpu",
                      .uses_gpus = device_.is_cuda(),
                      .test_loss = metrics.test_loss,
                      .test_accuracy = metrics.test_accuracy,
                      .mfu = mfu(job)},
                     job);
    const bool is_shown = evaluated_steps_ == steps_done_ && job.custom.empty();
    if (!is_shown && (metrics.test_loss || metrics.test_accuracy || !job.custom.empty())) {
      console_.log_evaluation({.done = steps_done_,
                               .loss = metrics.test_loss,
                               .accuracy = metrics.test_accuracy,
                               .custom = job.custom});
    }
  }
  return {.train_loss = job.loss(),
          .train_accuracy = job.accuracy(),
          .seconds = job.total.seconds,
          .samples_per_second = job.samples_per_second(),
          .custom = std::move(custom_results)};
}

}  // namespace detail

Metrics::Metrics(std::unique_ptr<detail::MetricsImpl> impl) : impl_(std::move(impl)) {}
Metrics::Metrics(const Context& context, const MetricsOptions& options)
    : impl_(std::make_unique<detail::MetricsImpl>(
          context.control_plane(), context.device(), context.launch(), options,
          [handle = detail::ContextHandle(context)](int64_t step) {
            handle.set_progress(step, "");
          })) {}
Metrics::~Metrics() = default;

void Metrics::set_exposed_comm(std::function<double()> last_backward_ms) {
  impl_->set_exposed_comm(std::move(last_backward_ms));
}
void Metrics::set_loader_wait(std::function<double()> total_ms) {
  impl_->set_loader_wait(std::move(total_ms));
}
void Metrics::set_flops_per_sample(double flops) {
  impl_->set_flops_per_sample(flops);
}
void Metrics::begin(int64_t first_step, int64_t num_steps, int64_t steps_per_epoch) {
  impl_->begin(first_step, num_steps, steps_per_epoch);
}
void Metrics::log(const std::string& name, const MetricValue& value, const LogOptions& options) {
  impl_->log(name, value, options);
}
void Metrics::log_epoch(const std::string& name, const MetricValue& value,
                        const LogOptions& options) {
  impl_->log_epoch(name, value, options);
}
void Metrics::add_writer(std::shared_ptr<MetricsWriter> writer) {
  impl_->add_writer(std::move(writer));
}
void Metrics::end_step(int64_t step, const StepMetrics& metrics) {
  impl_->end_step(step, metrics);
}
void Metrics::add_evaluation(int64_t step, const EpochMetrics& metrics) {
  impl_->add_evaluation(step, metrics);
}
EpochResult Metrics::end_epoch(int64_t epoch, const EpochMetrics& metrics) {
  return impl_->end_epoch(epoch, metrics);
}
const std::string& Metrics::folder() const {
  return impl_->folder();
}

Metrics::ClockPause::ClockPause(Metrics& metrics) : metrics_(metrics) {
  metrics_.impl_->pause();
}
Metrics::ClockPause::~ClockPause() {
  metrics_.impl_->resume();
}

}  // namespace ddp
