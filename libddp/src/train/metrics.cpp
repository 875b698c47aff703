// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/metrics.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include "core/message_codec.hpp"
#include "core/rank_position.hpp"
#include "ddp/core/logging.hpp"
#include "train/metrics_impl.hpp"
#include "train/trace_device.hpp"

namespace ddp {
namespace detail {
namespace {

RunFolder make_folder(const ControlPlane& control_plane, const LaunchEnvironment& launch,
                      const MetricsOptions& options) {
  if (control_plane.rank() != 0 || options.dir.empty()) {
    return {};
  }
  const auto& name = !options.run_name.empty() ? options.run_name
                     : !launch.job_id.empty()  ? launch.job_id
                                               : time_name(options.dir);
  return {options.dir, name, launch.job_id};
}

}  // namespace

MetricsImpl::MetricsImpl(ControlPlane& control_plane, at::Device device,
                         const LaunchEnvironment& launch, const MetricsOptions& options,
                         std::function<void(int64_t step)> set_progress)
    : control_plane_(control_plane),
      device_(device),
      launch_(launch),
      options_(options),
      set_progress_(std::move(set_progress)),
      folder_(make_folder(control_plane, launch, options)),
      sums_(at::zeros({2}, at::TensorOptions().dtype(at::kDouble).device(device))),
      loss_sum_(sums_[0]),
      correct_sum_(sums_[1]) {
  options.taken.set();
  if (const auto bus_id = pci_bus_id(device); !bus_id.empty()) {
    gpu_ = GpuMonitor::open(bus_id);
    if (gpu_) {
      gpu_numbers_ = std::make_unique<GpuSampler>([gpu = gpu_.get()]() -> GpuNumbers {
        return {.energy_joules = gpu->energy_joules(),
                .utilisation_percent = gpu->utilisation_percent()};
      });
    }
    epoch_energy_ = gpu_numbers().energy_joules;
  }
  if (options_.nvtx) {
    enable_nvtx();
  }
  make_tracer(0);
  if (!is_main()) {
    return;
  }
  commit_ = read_git_commit(".");
  bar_ =
      options_.progress == "bar" || (options_.progress == "auto" && ::isatty(STDERR_FILENO) == 1);
  if (!options_.run.settings_text.empty()) {
    log_info("resolved settings\n" + options_.run.settings_text);
    folder_.write("settings.txt", options_.run.settings_text);
  }
}

MetricsImpl::~MetricsImpl() {
  clear_bar();
}

double MetricsImpl::seconds_now() const {
  const auto until = pauses_ > 0 ? paused_at_ : Clock::now();
  return std::chrono::duration<double>(until - started_).count() - paused_seconds_;
}

// Energy since the first step, without pauses, like the seconds.
double MetricsImpl::energy_now() const {
  const double energy = pauses_ > 0 ? energy_at_pause_ : gpu_numbers().energy_joules;
  return energy - first_energy_ - paused_energy_;
}

void MetricsImpl::make_tracer(int64_t next_step) {
  tracer_.reset();  // before the next tracer records
  if (options_.trace_steps > 0) {
    const auto path = folder_.path().empty() ? std::string("trace.json") : folder() + "/trace.json";
    tracer_ = std::make_unique<Tracer>(control_plane_, device_, path, options_.trace_first_step,
                                       options_.trace_steps, next_step);
  }
}

void MetricsImpl::begin(int64_t first_step) {
  if (first_step > 0) {
    make_tracer(first_step);
  }
  set_progress_(first_step);
}

void MetricsImpl::pause() {
  if (pauses_++ == 0) {
    if (!device_.is_cpu()) {
      const c10::impl::VirtualGuardImpl guard(device_.type());
      guard.synchronizeStream(guard.getStream(device_));  // enqueued work counts as training
    }
    paused_at_ = Clock::now();
    energy_at_pause_ = gpu_numbers().energy_joules;
  }
}

void MetricsImpl::resume() {
  if (--pauses_ == 0) {
    paused_seconds_ += std::chrono::duration<double>(Clock::now() - paused_at_).count();
    paused_energy_ += gpu_numbers().energy_joules - energy_at_pause_;
  }
}

// Two one-element kernels; a loss in a graph's memory is read before the next replay.
void MetricsImpl::add_on_device(const StepMetrics& metrics) {
  at::NoGradGuard no_grad;
  const auto n = static_cast<double>(metrics.num_targets.value_or(metrics.num_samples));
  if (metrics.loss.defined()) {
    loss_sum_.add_(metrics.loss.detach().reshape({}), n);
    now_.loss_samples += n;
  }
  if (metrics.num_correct.defined()) {
    correct_sum_.add_(metrics.num_correct.detach().reshape({}));
    now_.correct_samples += n;
  }
}

void MetricsImpl::add_logged(const StepMetrics& metrics) {
  if (metrics.loss_at < 0 && metrics.num_correct_at < 0) {
    reads_device_ = true;
    return;
  }
  reads_device_ = reads_device_ && now_.steps > 0;
  const auto n = static_cast<double>(metrics.num_targets.value_or(metrics.num_samples));
  now_.loss_samples += metrics.loss_at >= 0 ? n : 0;
  now_.correct_samples += metrics.num_correct_at >= 0 ? n : 0;
  logged_.push_back({metrics.log, metrics.loss_at, metrics.num_correct_at, n});
  read_logs(/*all=*/false);
}

// Without `all`, reads only available logs: the host does not wait.
void MetricsImpl::read_logs(bool all) {
  while (!logged_.empty() && (all || logged_.front().log.is_ready())) {
    const auto& [log, loss_at, num_correct_at, n] = logged_.front();
    if (loss_at >= 0) {
      logged_loss_sum_ += n * log[loss_at];
    }
    if (num_correct_at >= 0) {
      logged_correct_ += log[num_correct_at];
    }
    logged_.pop_front();
  }
}

void MetricsImpl::end_step(int64_t step, const StepMetrics& metrics) {
  add_on_device(metrics);
  add_logged(metrics);
  const auto n = static_cast<double>(metrics.num_samples);
  now_.samples += n;
  now_.steps += 1;
  if (first_step_) {
    // Warm-up, lazy initialisation and earlier work do not count for speed.
    first_step_ = false;
    started_ = Clock::now();
    paused_seconds_ = 0;
    first_energy_ = gpu_numbers().energy_joules;
    paused_energy_ = 0;
    now_.loader_wait_ms = loader_wait ? loader_wait() : 0;
    at_log_.loader_wait_ms = now_.loader_wait_ms;
  } else {
    now_.timed_samples += n;
    now_.timed_steps += 1;
  }
  set_progress_(step + 1);
  const bool last = options_.run.max_steps > 0 && step + 1 == options_.run.max_steps;
  if (options_.log_every > 0 && ((step + 1) % options_.log_every == 0 || last)) {
    log_step(step, metrics);
  }
  draw_bar(step, last);
  if (tracer_) {
    tracer_->end_step(step);
  }
}

// The only place where the host waits for the device. Returns the gradient norm.
std::optional<double> MetricsImpl::fetch(const StepMetrics& metrics) {
  at::NoGradGuard no_grad;
  std::optional<double> norm;
  read_logs(/*all=*/true);
  if (metrics.grad_norm_at >= 0) {
    norm = metrics.log[metrics.grad_norm_at];
  }
  now_.loss_sum = logged_loss_sum_;
  now_.correct = logged_correct_;
  if (reads_device_) {
    auto values = sums_;
    if (metrics.grad_norm.defined()) {
      values = at::cat({sums_, metrics.grad_norm.detach().reshape({1}).to(sums_.options())});
    }
    const auto host = values.cpu();
    const double* data = host.const_data_ptr<double>();
    now_.loss_sum += data[0];
    now_.correct += data[1];
    norm = metrics.grad_norm.defined() ? std::optional(data[2]) : norm;
  }
  now_.seconds = first_step_ ? 0 : seconds_now();
  now_.energy_j = first_step_ ? 0 : energy_now();
  if (loader_wait) {
    now_.loader_wait_ms = loader_wait();
  }
  sample_gpu();
  return norm;
}

void MetricsImpl::sample_gpu() {
  const double utilisation = gpu_numbers().utilisation_percent;
  if (!std::isnan(utilisation)) {
    utilisation_sum_ += utilisation;
    ++utilisation_samples_;
  }
}

RankNumbers MetricsImpl::numbers_since(const Counts& start) {
  const double steps = now_.timed_steps - start.timed_steps;
  return {.loss_sum = now_.loss_sum - start.loss_sum,
          .loss_samples = now_.loss_samples - start.loss_samples,
          .correct = now_.correct - start.correct,
          .correct_samples = now_.correct_samples - start.correct_samples,
          .samples = now_.timed_samples - start.timed_samples,
          .seconds = now_.seconds - start.seconds,
          .steps = steps,
          .loader_wait_ms =
              loader_wait && steps > 0 ? (now_.loader_wait_ms - start.loader_wait_ms) / steps : NAN,
          .memory_gib = used_memory_gib(device_),
          .energy_j = now_.energy_j - start.energy_j};
}

JobNumbers MetricsImpl::gather(const RankNumbers& own, bool to_all) {
  const ActivityScope activity(control_plane_, "metrics");
  return JobNumbers(to_all ? all_gather_messages(control_plane_, own)
                           : gather_messages(control_plane_, own));
}

}  // namespace detail

Metrics::Metrics(ControlPlane& control_plane, at::Device device, const LaunchEnvironment& launch,
                 const MetricsOptions& options)
    : impl_(std::make_unique<detail::MetricsImpl>(
          control_plane, device, launch, options,
          [&control_plane](int64_t step) { control_plane.set_progress(step, ""); })) {}
Metrics::Metrics(const Context& context, const MetricsOptions& options)
    : impl_(std::make_unique<detail::MetricsImpl>(
          context.control_plane(), context.device(), context.launch(), options,
          [&context](int64_t step) { context.set_progress(step, ""); })) {}
Metrics::~Metrics() = default;

void Metrics::set_exposed_comm(std::function<double()> last_backward_ms) {
  impl_->exposed_comm = std::move(last_backward_ms);
}
void Metrics::set_loader_wait(std::function<double()> total_ms) {
  impl_->loader_wait = std::move(total_ms);
}
void Metrics::begin(int64_t first_step) {
  impl_->begin(first_step);
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
