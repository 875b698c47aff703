// SPDX-License-Identifier: Apache-2.0
// Metrics of a run: one line per logging step, also in steps.csv and steps.jsonl, and one row per
// epoch in epochs.csv and epochs.jsonl. Evaluations between epochs have a line and a row in
// evals.csv and evals.jsonl. run.json has the constants of the run from its start on. Rank 0 writes
// to metrics.dir/<run name, job id or time>. The constructor throws an Error with exit code 64 if
// another process uses that folder.
//
// docs/metrics.md defines the columns. Unknown values are omitted; a NaN loss or norm is shown as
// nan. The host waits for the device on logging steps, on the first step, in a ClockPause, and on
// the second step with packed attention. Other steps enqueue two small kernels at most.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "ddp/comm/context.hpp"
#include "ddp/detail/metric_value.hpp"
#include "ddp/train/custom_metrics.hpp"
#include "ddp/train/options.hpp"

namespace ddp {

namespace detail {
class MetricsImpl;
}

/// The numbers of one step on this rank.
struct StepMetrics {
  MetricValue loss = {};          ///< mean over the targets
  int64_t num_samples = 0;        ///< the unit of the rates
  std::optional<double> lr = {};  ///< of the step
  MetricValue grad_norm = {};     ///< before clipping
  MetricValue num_correct = {};   ///< correct targets, for the accuracy
  /// Targets over which `loss` is the mean, for example tokens with a label; unset: num_samples.
  std::optional<int64_t> num_targets = {};
};

/// What an evaluation found, for its line and row.
struct EpochMetrics {
  std::optional<double> test_loss = {};       ///< mean over the samples
  std::optional<double> test_accuracy = {};   ///< 0..1
  std::map<std::string, double> custom = {};  ///< further numbers of the evaluation, not reduced
};

/// What an epoch's row holds, on every rank.
struct EpochResult {
  std::optional<double> train_loss = {};      ///< mean over the epoch's targets
  std::optional<double> train_accuracy = {};  ///< 0..1
  double seconds = 0;                         ///< training time without ClockPause
  double samples_per_second = NAN;            ///< NaN if nothing was timed
  std::map<std::string, double> custom = {};  ///< log_epoch's metrics, over all ranks
};

/// Collective methods are called by all ranks, in the same order, from the training thread.
class Metrics {
 public:
  /// Reports each step to `context` (set_progress), which must outlive this object but may move.
  /// Throws WriteError if the run folder cannot be made.
  Metrics(const Context& context, const MetricsOptions& options);
  explicit Metrics(std::unique_ptr<detail::MetricsImpl> impl);  ///< internal
  ~Metrics();

  /// Logging steps report all models and loaders that this thread made: models that trained since
  /// the last logging step, and loaders without pauses. Call observe() only for your own types.
  /// `object` must outlive the Metrics and must not move. It replaces libddp's models, or loaders,
  /// in the reports.
  template <typename T>
  void observe(T& object) {
    if constexpr (requires { double(object.exposed_communication_ms()); }) {
      set_exposed_comm([&object] { return double(object.exposed_communication_ms()); });
    }
    if constexpr (requires { double(object.wait_ms()); }) {
      set_loader_wait([&object] { return double(object.wait_ms()); });
    }
  }
  /// Reports the milliseconds that `last_backward_ms` returns.
  void set_exposed_comm(std::function<double()> last_backward_ms);
  void set_loader_wait(std::function<double()> total_ms);  ///< the sum since the start
  /// FLOPs of a training step per sample (the unit of num_samples), forward and backward, for the
  /// columns tflops_per_rank and mfu. Without this call they are counted in the second step: matrix
  /// products, convolutions and attention, without what is computed again. Throws SettingsError
  /// unless the number is finite and above 0.
  void set_flops_per_sample(double flops);

  /// Collective. Call before the first step. Required if the first step is not step 0, because a
  /// trace may begin there. `num_steps` is for the bar and the remaining time, `steps_per_epoch`
  /// for the epoch in each line (0: unknown). A loop over epochs has
  /// `cfg.train.num_steps(steps_per_epoch)` steps.
  void begin(int64_t first_step, int64_t num_steps = 0, int64_t steps_per_epoch = 0);
  /// Adds a value of a custom metric to this step, before end_step. The next logging step's line
  /// and row have the metric reduced over its interval and all ranks. All ranks must log the same
  /// names, with weight 0 where there is no value. Otherwise the logging step ends the job with
  /// MismatchError (70), which names the metric and a rank without it.
  void log(const std::string& name, const MetricValue& value, const LogOptions& options = {});
  /// The same for the row and the result of the next end_epoch, for example of an evaluation.
  /// "test_loss" and "test_accuracy" fill the columns of EpochMetrics.
  void log_epoch(const std::string& name, const MetricValue& value, const LogOptions& options = {});
  /// Sends all later rows to `writer` too, on rank 0.
  void add_writer(std::shared_ptr<MetricsWriter> writer);
  /// Call after each step. Collective on logging steps and at both ends of a trace.
  void end_step(int64_t step, const StepMetrics& metrics);
  /// Call after an evaluation between epochs: writes its line and row. Not collective.
  void add_evaluation(int64_t step, const EpochMetrics& metrics);
  /// Call after an epoch and its evaluation. Starts the next epoch. Collective.
  EpochResult end_epoch(int64_t epoch, const EpochMetrics& metrics = {});

  /// Stops the clock: excludes evaluation and other pauses from training time. First waits for the
  /// current stream, whose steps count as training.
  class ClockPause {
   public:
    explicit ClockPause(Metrics& metrics);  ///< until the object is destroyed
    ~ClockPause();
    ClockPause(const ClockPause&) = delete;
    ClockPause& operator=(const ClockPause&) = delete;

   private:
    Metrics& metrics_;
  };

  /// The run folder on rank 0; empty on other ranks and without a folder.
  const std::string& folder() const;

 private:
  std::unique_ptr<detail::MetricsImpl> impl_;
};

}  // namespace ddp
