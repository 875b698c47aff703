// SPDX-License-Identifier: Apache-2.0
// The save in progress, which all ranks advance alike:
//
//   Writing      each rank writes its files; ends when no rank's writer runs
//   Committing   rank 0 writes the manifest, renames the folder and evicts old checkpoints
//
// A failure in either phase drops the save on all ranks.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "train/checkpoint_texts.hpp"
#include "train/checkpoint_writer.hpp"
#include "train/save_history.hpp"

namespace ddp::detail {

class CheckpointSaver {
 public:
  /// What a saver reports to and writes with. All of it must outlive the saver.
  struct Parts {
    CheckpointDir& dir;
    CheckpointTexts& texts;
    SaveHistory& history;
    const std::vector<StatefulRef>& objects;
  };
  CheckpointSaver(ControlPlane& control_plane, at::Device device, const CheckpointOptions& options,
                  const Parts& parts);

  /// Starts a save without waiting for the writes. Call without a save in progress. After a failure
  /// that the history allows there is none afterwards either. Collective.
  void begin(int64_t done, std::optional<double> metric, const std::string& why_not_finite);
  /// The step of the save in progress, or nothing.
  std::optional<SavedStep> in_progress() const;

  /// This rank's part of an exchange.
  WriterStatus status() const;
  /// Advances the save in progress, if any; the result depends only on the gathered statuses.
  /// Throws SaveFailure if the save failed and the history allows no more failures.
  void advance(const std::vector<RankStatus>& statuses);
  /// Waits for this rank's writer. Not collective.
  void wait_for_writer() { writer_.wait(); }

 private:
  using Clock = std::chrono::steady_clock;
  enum class Phase { Writing, Committing };
  struct Pending {
    int64_t step;
    std::string folder;            ///< within the checkpoints' folder
    bool has_metric = false;       ///< on every rank
    std::optional<double> metric;  ///< on rank 0
    std::string not_finite = "";   ///< why it counts as not finite; set once all ranks have written
    Phase phase = Phase::Writing;
    Clock::time_point started = Clock::now();
  };

  bool is_main() const { return control_plane_.rank() == 0; }
  std::string agree_on_folder(int64_t done);
  void finish_writing(const std::vector<RankStatus>& statuses);
  void start_commit(const std::vector<RankStatus>& statuses);
  void finish_commit();
  void drop(int rank, const std::string& reason);

  ControlPlane& control_plane_;
  const bool async_;
  CheckpointDir& dir_;
  CheckpointTexts& texts_;
  SaveHistory& history_;
  std::optional<Pending> pending_;
  CheckpointWriter writer_;
};

}  // namespace ddp::detail
