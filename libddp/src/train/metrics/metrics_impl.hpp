// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/log/step_waits.hpp"
#include "ddp/train/metrics.hpp"
#include "train/metrics/console/metrics_console.hpp"
#include "train/metrics/custom_metrics.hpp"
#include "train/metrics/files/metrics_files.hpp"
#include "train/metrics/ranks/device_sensors.hpp"
#include "train/metrics/ranks/metrics_ranks.hpp"
#include "train/metrics/ranks/rank_counter.hpp"
#include "train/metrics/ranks/stragglers.hpp"
#include "train/metrics/sample_flops.hpp"
#include "train/metrics/training_clock.hpp"
#include "train/trace/trace.hpp"

namespace ddp::detail {

class MetricsImpl {
 public:
  /// Calls `set_progress` with each step that begins.
  MetricsImpl(ControlPlane& control_plane, at::Device device, const LaunchEnvironment& launch,
              const MetricsOptions& options, std::function<void(int64_t step)> set_progress);

  void begin(int64_t first_step, int64_t num_steps, int64_t steps_per_epoch);
  void log(const std::string& name, const MetricValue& value, const LogOptions& options);
  void log_epoch(const std::string& name, const MetricValue& value, const LogOptions& options);
  void add_writer(std::shared_ptr<MetricsWriter> writer) { files_.add_writer(std::move(writer)); }
  void end_step(int64_t step, const StepMetrics& metrics);
  EpochResult end_epoch(int64_t epoch, const EpochMetrics& metrics);
  void add_evaluation(int64_t step, const EpochMetrics& metrics);
  void pause();
  void resume();
  const std::string& folder() const { return files_.path(); }

  void set_exposed_comm(std::function<double()> call) { exposed_comm_ = std::move(call); }
  void set_flops_per_sample(double flops);
  void set_loader_wait(std::function<double()> call) {
    own_loader_wait_ = std::move(call);
    loader_wait_.restart();
  }

 private:
  bool is_main() const { return control_plane_.rank() == 0; }
  void write_run();
  void make_tracer(int64_t next_step);
  void add_losses(const StepMetrics& metrics);
  /// Waits for enqueued work, so that its time counts.
  void wait_for_device() const;
  /// Brings the counter up to date.
  void read();
  /// Collective. Unless `to_all`, only rank 0 gets the numbers.
  std::vector<RankNumbers> gather(RankNumbers own, bool to_all);
  void log_step(int64_t step, const StepMetrics& metrics);
  /// Of the models that this thread made and that trained since the last call, unless
  /// set_exposed_comm() was called. NaN: there is none.
  double read_exposed_comm_ms();
  /// Brings loader_wait_ up to date.
  void read_loader_wait(bool counts = true);
  std::optional<double> tflops_per_rank(const JobNumbers& job) const;
  std::optional<double> mfu(const JobNumbers& job) const;  ///< share of the peak, 0..1
  std::optional<double> epochs_at(int64_t step) const;

  ControlPlane& control_plane_;
  const at::Device device_;
  const MetricsOptions options_;
  const std::function<void(int64_t)> set_progress_;
  std::function<double()> exposed_comm_;
  std::function<double()> own_loader_wait_;
  int64_t steps_done_ = 0;
  int64_t steps_in_epoch_ = 0;    // since the last row, of this start
  int64_t evaluated_steps_ = -1;  // done at the last add_evaluation
  int64_t num_steps_ = 0, steps_per_epoch_ = 0;

  MetricsFiles files_;
  CustomMetrics losses_, custom_, custom_of_epoch_;
  DeviceSensors sensors_;
  const RankDevice place_;
  RankCounter counter_;
  LoaderWait loader_wait_;
  ReductionWait reduction_wait_;
  Stragglers stragglers_;
  SampleFlops flops_;
  TrainingClock clock_;
  std::unique_ptr<Tracer> tracer_;
  MetricsConsole console_;  // last: clears its bar before other members log their ends
};

}  // namespace ddp::detail
