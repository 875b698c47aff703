// SPDX-License-Identifier: Apache-2.0
// The save in progress, which all ranks advance in the same way:
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

#include "train/background_task.hpp"
#include "train/checkpoint/checkpoint_exchange.hpp"
#include "train/checkpoint/checkpoint_files.hpp"
#include "train/checkpoint/checkpoint_texts.hpp"
#include "train/checkpoint/save_history.hpp"
#include "train/checkpoint/snapshot.hpp"

namespace ddp::detail {

/// One rank's part of a save, on its own thread: writes this rank's files, and on rank 0 commits
/// the checkpoint. All calls are from the training thread. write() and commit() must not be called
/// while a task runs.
class CheckpointWriter {
 public:
  /// `dir` and `objects` must outlive the writer.
  CheckpointWriter(CheckpointDir& dir, const std::vector<StatefulRef>& objects, int rank,
                   at::Device device);

  /// Copies the objects' state to the host, then writes it to the folder `saving`. `why_not_finite`
  /// is empty if the program knows of no reason. A failed copy is reported like a failed write.
  void write(const std::string& saving, const std::string& why_not_finite);
  /// On rank 0, after write(): adds this rank's values to the manifest and commits.
  void commit(const std::string& saving, Manifest manifest);

  void wait() { task_.wait(); }
  /// After write(): with its files. After commit(): without them.
  WriterStatus status(bool with_files) const;
  /// Name of the last committed checkpoint; empty on other ranks. Call when no task runs.
  const std::string& committed() const { return committed_; }

 private:
  void write_files(const std::string& saving);

  CheckpointDir& dir_;
  const std::vector<StatefulRef>& objects_;
  const int rank_;
  const at::Device device_;
  HostBuffers buffers_;

  // The running task owns these members; the training thread reads them when no task runs.
  Snapshot snapshot_;
  std::vector<FileRecord> records_;
  std::string not_finite_;  ///< why this rank's part is not finite
  std::string committed_;

  BackgroundTask task_;  // last: ends before the members that it uses
};

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

  /// Starts a save without waiting for the writes. Call without a save in progress. If the save
  /// fails and the history allows that, no save is in progress afterwards. Collective.
  void begin(int64_t done, std::optional<double> metric, const std::string& why_not_finite);
  /// The step of the save in progress, or nothing.
  std::optional<SavedStep> in_progress() const;

  /// This rank's part of an exchange.
  WriterStatus status() const;
  /// Advances the save in progress, if any; the result depends only on the gathered statuses.
  /// Throws SaveFailure if the save failed and the history allows no more failures. On rank 0
  /// returns the name of a checkpoint that this call found committed, else an empty text.
  std::string advance(const std::vector<RankStatus>& statuses);
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
  std::string finish_commit();
  void drop(int rank, const std::string& reason);

  ControlPlane& control_plane_;
  const bool async_;
  const std::string keep_best_;
  const int64_t samples_per_step_;
  CheckpointDir& dir_;
  CheckpointTexts& texts_;
  SaveHistory& history_;
  std::optional<Pending> pending_;
  CheckpointWriter writer_;
};

}  // namespace ddp::detail
