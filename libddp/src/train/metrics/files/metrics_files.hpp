// SPDX-License-Identifier: Apache-2.0
// The rows of a run's metrics, which rank 0 writes: steps, evaluations, epochs; its settings and
// constants.
// Torch-free.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/launch/launch_environment.hpp"
#include "ddp/train/options.hpp"
#include "train/metrics/files/run_folder.hpp"
#include "train/metrics/metrics_format.hpp"
#include "train/metrics/ranks/metrics_ranks.hpp"

namespace ddp::detail {

class TensorboardWriter;

/// The name of the program in the text of a /proc/<pid>/cmdline, whose arguments end with a NUL.
std::string program_name(const std::string& arguments);

/// The CPU's name in the text of /proc/cpuinfo. Empty if the text has none, as on Arm.
std::string cpu_name(const std::string& cpuinfo);

class MetricsFiles {
 public:
  /// Makes and takes the run folder. On other ranks than rank 0, and without a folder, all output
  /// is dropped. Throws as RunFolder does.
  MetricsFiles(const MetricsOptions& options, const LaunchEnvironment& launch, bool is_main);
  MetricsFiles(const MetricsFiles&) = delete;  // writers refer to the folder
  MetricsFiles& operator=(const MetricsFiles&) = delete;

  /// Empty without a run folder.
  const std::string& path() const { return folder_.path(); }
  void add_writer(std::shared_ptr<MetricsWriter> writer);
  void write_settings(const std::string& text) { folder_.write("settings.txt", text); }
  /// Where a run computes.
  struct Place {
    int ranks = 1;
    std::string gpu_type = "";  ///< "cpu" without a GPU
    bool uses_gpus = false;     ///< one per rank
  };
  /// What run.json holds beside the constants of each epoch's row. 0: unknown.
  struct Start {
    std::string host = {};  ///< of rank 0, as the CPU and the driver that write_run() reads
    std::string device = {};
    int64_t num_steps = 0;
    int64_t steps_per_epoch = 0;
    std::optional<double> flops_per_sample = {};
    std::optional<double> peak_tflops = {};  ///< of one rank's device
    std::string versions = {};               ///< of libraries, as --version prints them
  };
  /// Whether there is no run.json of an earlier start.
  bool is_first_start() const;
  /// Replaces run.json. Call it on the first start, and after the first step, which may have used
  /// more sections of the settings. A later start of a finished run makes no step, so it must not
  /// call it before.
  void write_run(const Place& place, const Start& start);
  /// Call it before the first row of training, with the steps done so far. Removes rows of later
  /// steps: an earlier start wrote them, and this run repeats them. Later calls do nothing.
  void begin(int64_t steps_done);
  void add_step(const LoggedNumbers& numbers);
  /// Replaces ranks.json: at most once a second, and at the last step.
  void write_ranks(int64_t step, int64_t max_steps, const std::vector<RankNumbers>& ranks,
                   const std::vector<Straggler>& stragglers);
  void add_evaluation(const EvaluationNumbers& evaluation);

  struct Epoch {
    int64_t epoch = 0;
    int64_t steps_done = 0;        ///< of the run
    int64_t num_steps = 0;         ///< 0: unknown
    int64_t num_steps_in_row = 0;  ///< since the last row or the start: fewer if an epoch is cut
    std::string gpu_type = "";     ///< see Place
    bool uses_gpus = false;        ///< see Place
    std::optional<double> test_loss = {};
    std::optional<double> test_accuracy = {};
    std::optional<double> mfu = {};
  };
  /// The columns of an epoch's row without custom metrics. Omits test_loss and test_accuracy, which
  /// log_epoch() may fill.
  std::vector<std::string> columns_of_epochs() const;
  /// The first call removes rows of the same and later epochs.
  void add_epoch(const Epoch& epoch, const JobNumbers& job);

 private:
  /// The columns that describe the run.
  Row constants(const Place& place) const;
  Row epoch_row(const Epoch& epoch, const JobNumbers& job) const;
  void write(const std::string& table, const Row& row);

  const MetricsOptions options_;
  const LaunchEnvironment launch_;
  RunFolder folder_;
  const bool is_main_;
  const std::string commit_;
  std::vector<std::shared_ptr<MetricsWriter>> writers_;
  std::shared_ptr<TensorboardWriter> tensorboard_;  // also in writers_; null without event files
  const double started_;                            // Unix time
  double ranks_written_ = 0;                        // Unix time
  bool has_begun_ = false;
  bool has_epochs_ = false;
};

}  // namespace ddp::detail
