// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ddp/train/metrics.hpp"
#include "ddp/train/trace.hpp"
#include "train/gpu_monitor.hpp"
#include "train/metrics_format.hpp"
#include "train/run_folder.hpp"

namespace ddp::detail {

/// What a rank adds to a line or row.
struct RankNumbers {
  double loss_sum = 0;
  double loss_samples = 0;
  double correct = 0;
  double correct_samples = 0;
  double samples = 0;  ///< in `seconds`
  double seconds = 0;
  double steps = 0;  ///< in `seconds`
  double exposed_comm_ms = NAN;
  double loader_wait_ms = NAN;
  double memory_gib = NAN;
  double utilisation = NAN;
  double power_w = NAN;
  double energy_j = NAN;  ///< in `seconds`

  friend auto message_fields(RankNumbers& n) {
    return std::tie(n.loss_sum, n.loss_samples, n.correct, n.correct_samples, n.samples, n.seconds,
                    n.steps, n.exposed_comm_ms, n.loader_wait_ms, n.memory_gib, n.utilisation,
                    n.power_w, n.energy_j);
  }
};

/// Sums, maxima and means over ranks; means omit ranks without the value.
struct JobNumbers {
  explicit JobNumbers(const std::vector<RankNumbers>& ranks);
  RankNumbers total;  ///< sums (energy too; NaN if unknown on a rank); seconds, steps and memory:
                      ///< the maximum
  int world_size;

  std::optional<double> loss() const { return ratio(total.loss_sum, total.loss_samples); }
  std::optional<double> accuracy() const { return ratio(total.correct, total.correct_samples); }
  double samples_per_second() const {
    return total.seconds > 0 && total.samples > 0 ? total.samples / total.seconds : NAN;
  }
  double step_ms() const { return total.steps > 0 ? 1000 * total.seconds / total.steps : NAN; }

 private:
  static std::optional<double> ratio(double sum, double count) {
    return count > 0 ? std::optional(sum / count) : std::nullopt;
  }
};

class MetricsImpl {
 public:
  /// Calls `set_progress` with each step that begins.
  MetricsImpl(ControlPlane& control_plane, at::Device device, const LaunchEnvironment& launch,
              const MetricsOptions& options, std::function<void(int64_t step)> set_progress);
  ~MetricsImpl();

  void begin(int64_t first_step);
  void end_step(int64_t step, const StepMetrics& metrics);
  EpochResult end_epoch(int64_t epoch, const EpochMetrics& metrics);
  void add_evaluation(int64_t step, const EpochMetrics& metrics);
  void pause();
  void resume();
  const std::string& folder() const { return folder_.path(); }

  std::function<double()> exposed_comm;
  std::function<double()> loader_wait;

 private:
  using Clock = std::chrono::steady_clock;
  /// Counts since the start; an interval or epoch is the difference of two Counts.
  struct Counts {
    double loss_sum = 0;
    double correct = 0;
    double loss_samples = 0;
    double correct_samples = 0;
    double samples = 0;
    double steps = 0;
    double timed_samples = 0;  ///< without the first step
    double timed_steps = 0;
    double seconds = 0;  ///< training time after the first step
    double loader_wait_ms = 0;
    double energy_j = 0;  ///< in `seconds`; NaN if the GPU does not report it
  };

  bool is_main() const { return control_plane_.rank() == 0; }
  double seconds_now() const;
  double energy_now() const;
  /// NaN if unknown.
  GpuNumbers gpu_numbers() const { return gpu_numbers_ ? gpu_numbers_->latest() : GpuNumbers{}; }
  void add_on_device(const StepMetrics& metrics);
  void add_logged(const StepMetrics& metrics);
  void read_logs(bool all);
  void make_tracer(int64_t next_step);
  std::optional<double> fetch(const StepMetrics& metrics);
  RankNumbers numbers_since(const Counts& start);
  /// Collective. Unless `to_all`, only rank 0 gets the numbers.
  JobNumbers gather(const RankNumbers& own, bool to_all);
  void log_step(int64_t step, const StepMetrics& metrics);
  void draw_bar(int64_t step, bool force);
  void clear_bar();
  double eta_seconds(int64_t step) const;
  std::optional<double> epochs_at(int64_t step) const;
  Row epoch_row(int64_t epoch, const EpochMetrics& metrics, const JobNumbers& job) const;
  void sample_gpu();

  ControlPlane& control_plane_;
  const at::Device device_;
  const LaunchEnvironment launch_;
  const MetricsOptions options_;
  const std::function<void(int64_t)> set_progress_;
  RunFolder folder_;
  std::unique_ptr<GpuMonitor> gpu_;
  std::unique_ptr<GpuSampler> gpu_numbers_;  // samples gpu_; null if gpu_ is null
  std::unique_ptr<Tracer> tracer_;
  std::string commit_;
  bool bar_ = false;
  bool bar_shown_ = false;
  Clock::time_point bar_time_{};

  at::Tensor sums_;  ///< float64 [2] on the device: loss times samples, correct answers
  at::Tensor loss_sum_, correct_sum_;
  bool reads_device_ = true;  ///< false: all numbers so far came from logs
  /// Steps whose numbers the host has not read yet, and the sums of the read ones.
  struct Logged {
    StepLog log;
    int loss_at;
    int num_correct_at;
    double num_targets;
  };
  std::deque<Logged> logged_;
  double logged_loss_sum_ = 0;
  double logged_correct_ = 0;
  Counts now_, at_log_, at_epoch_;
  bool first_step_ = true;
  Clock::time_point started_ = Clock::now();
  Clock::time_point paused_at_{};
  double paused_seconds_ = 0;
  int pauses_ = 0;
  double first_energy_ = 0;  ///< the GPU's counter when the first step ended, J
  double energy_at_pause_ = 0;
  double paused_energy_ = 0;
  double last_step_ms_ = NAN;
  std::optional<double> last_loss_;

  double utilisation_sum_ = 0;  ///< over the epoch's samples
  int utilisation_samples_ = 0;
  double epoch_energy_ = NAN;
  Clock::time_point epoch_wall_ = Clock::now();
};

}  // namespace ddp::detail
