// SPDX-License-Identifier: Apache-2.0
// The rows of a run's metrics as an event file of TensorBoard. Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "ddp/train/custom_metrics.hpp"
#include "train/metrics/files/run_folder.hpp"

namespace ddp::detail {

/// events.out.tfevents.<microseconds>.<host>.<process>, a new file for each start. Tags are
/// "<table>/<column>". The folder must outlive the writer.
class TensorboardWriter : public MetricsWriter {
 public:
  explicit TensorboardWriter(RunFolder& folder) : folder_(folder) {}

  /// Call it before the first row of training, with the steps done so far. TensorBoard then drops
  /// rows of later steps in earlier files of the folder, because this run repeats them. For a run
  /// that begins at step 0 it drops all rows.
  void start(int64_t steps_done);
  /// The step of rows that do not name one.
  void set_step(int64_t steps_done) { step_ = steps_done; }
  void begin(const std::string& folder, const std::string& settings) override;
  void write(const std::string& table, const MetricsRow& row) override;

 private:
  /// The first call also makes the file.
  void add(double unix_time, const std::string& event);
  void add_settings(double unix_time);

  RunFolder& folder_;
  std::string name_;  ///< of the run
  std::string settings_;
  std::string file_;
  int64_t step_ = 0;
};

}  // namespace ddp::detail
