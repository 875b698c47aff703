// SPDX-License-Identifier: Apache-2.0
// One rank's part of a save, on its own thread: writes this rank's files, and on rank 0 commits the
// checkpoint.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "train/background_task.hpp"
#include "train/checkpoint_dir.hpp"
#include "train/checkpoint_exchange.hpp"
#include "train/snapshot.hpp"

namespace ddp::detail {

/// All calls are from the training thread. write() and commit() must not be called while a task
/// runs.
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

}  // namespace ddp::detail
