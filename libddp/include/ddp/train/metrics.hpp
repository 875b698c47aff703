// SPDX-License-Identifier: Apache-2.0
// The numbers of a run: one line a logging step, the same in steps.csv and steps.jsonl, and one row
// an epoch in epochs.csv, in the run folder metrics.dir/<run name, job id or time>. Rank 0 writes.
// Evaluations between epochs have a line and a row in evals.csv and evals.jsonl. One process at a
// time writes there: a run folder that another one uses is refused with 64, as Checkpointer does.
//
// Definitions (an interval is the steps since the last logging step):
//   loss, accuracy    mean over all targets of all ranks in the interval (one a sample, unless
//                     StepMetrics::num_targets says otherwise)
//   grad_norm, lr     of the logging step
//   step_ms           wall time of the interval / its steps, on the slowest rank
//   images_per_second samples of all ranks / that wall time; per rank: divided by the ranks. Named
//                     after RunInfo::sample_unit: a language run has tokens_per_second, of real
//                     tokens, without padding
//   exposed_comm_ms   last backward's wait for reductions that nothing hid, mean of ranks
//   loader_wait_ms    wait for the loader a step, mean of ranks
//   interval_seconds  that wall time
//   energy_j          what all ranks' GPUs consumed in it, by NVML's counter of up to 50 ms ago
//   peak_memory_gib   of the whole device (of the process where it runs on the CPU), largest rank
// The first step of a run, with its warm-up, counts for loss but not for time. What is not known is
// left out; a loss or norm that is NaN is known, and shown as nan.
//
// Nothing leaves the GPU but on logging steps: between them a step costs two one-element kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "ddp/comm/context.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/train/metrics_options.hpp"
#include "ddp/train/step_log.hpp"

namespace ddp {

namespace detail {
class MetricsImpl;
}

struct StepMetrics {
  at::Tensor loss = {};     ///< one element: mean of this rank's targets; may require grad
  int64_t num_samples = 0;  ///< of this rank in this step; what the rates count
  std::optional<double> lr = {};
  at::Tensor grad_norm = {};    ///< one element
  at::Tensor num_correct = {};  ///< one element: this rank's right answers, for the accuracy
  /// What `loss` is the mean over and `num_correct` counts, where that is not num_samples: of a
  /// language model the tokens that have a label.
  std::optional<int64_t> num_targets = {};
  /// Where a GraphedStep ran the step: its numbers, instead of the tensors above, and which of them
  /// are what (-1: none). The host reads them when the device has come that far: no kernel more.
  StepLog log = {};
  int loss_at = -1;
  int num_correct_at = -1;
  int grad_norm_at = -1;
};

struct EpochMetrics {
  std::optional<double> test_loss = {};
  std::optional<double> test_accuracy = {};  ///< 0..1
};

/// What an epoch's row says, for programs that print it at their end.
struct EpochResult {
  std::optional<double> train_loss = {};
  std::optional<double> train_accuracy = {};
  double seconds = 0;               ///< of training, without what ClockPause covered
  double samples_per_second = NAN;  ///< NaN where nothing was timed
};

/// Collective methods are called by all ranks, in the same order, from the thread that trains.
class Metrics {
 public:
  /// Tells `context`, which outlives it and stays in its place, of each step (set_progress). Throws
  /// WriteError where the run folder cannot be made.
  Metrics(const Context& context, const MetricsOptions& options);
  /// The same without a Context: the control plane alone hears of the steps.
  Metrics(ControlPlane& control_plane, at::Device device, const LaunchEnvironment& launch,
          const MetricsOptions& options);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  /// Reads exposed_communication_ms() of a model and wait_ms() (since its start) of a loader, on
  /// logging steps. The object must outlive the Metrics.
  template <typename T>
  void observe(T& object) {
    if constexpr (requires { double(object.exposed_communication_ms()); }) {
      set_exposed_comm([&object] { return double(object.exposed_communication_ms()); });
    }
    if constexpr (requires { double(object.wait_ms()); }) {
      set_loader_wait([&object] { return double(object.wait_ms()); });
    }
  }
  void set_exposed_comm(std::function<double()> last_backward_ms);
  void set_loader_wait(std::function<double()> total_ms);

  /// Before the first step, where that is not step 0 (Checkpointer::restore): a trace may begin
  /// with it. Collective.
  void begin(int64_t first_step);

  /// After each step. Collective on logging steps and at both ends of a trace.
  void end_step(int64_t step, const StepMetrics& metrics);

  /// After an evaluation between epochs: a line and a row of their own. Not collective.
  void add_evaluation(int64_t step, const EpochMetrics& metrics);

  /// After an epoch and its evaluation. Collective. Starts the next epoch.
  EpochResult end_epoch(int64_t epoch, const EpochMetrics& metrics = {});

  /// Stops the clock: evaluation and the like do not count as training time. Waits for the current
  /// stream first, because the steps enqueued there do.
  class ClockPause {
   public:
    explicit ClockPause(Metrics& metrics);
    ~ClockPause();
    ClockPause(const ClockPause&) = delete;
    ClockPause& operator=(const ClockPause&) = delete;

   private:
    Metrics& metrics_;
  };

  /// The run folder on rank 0; empty elsewhere and where there is none.
  const std::string& folder() const;

 private:
  std::unique_ptr<detail::MetricsImpl> impl_;
};

}  // namespace ddp
