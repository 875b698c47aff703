// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "common/save_trained.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/train/checkpoint.hpp"
#include "models/qwen2.hpp"

namespace examples {

struct TrainedFolderOptions {
  std::string path = "";              ///< rank 0's counts; empty: nothing is saved
  bool is_in_checkpoint_dir = false;  ///< not named by itself: it moves with that folder
  TrainedFrom from = {};
};

/// Where a run writes what it trains: PATH/best and PATH/last. What another run trained, or anybody
/// else put there, is never replaced: a run that starts at step 0 must find both places free, one
/// that goes on may find its own files, which its checkpoint tells; others beside them stay. All
/// methods are collective, rank 0 writes.
class TrainedFolder {
 public:
  /// All outlive it.
  TrainedFolder(const ddp::Context& context, ddp::Checkpointer& checkpointer,
                const models::Qwen2Impl& module, TrainedFolderOptions options);

  /// After Checkpointer::restore gave `first_step`; notes the folder for later checkpoints. Throws,
  /// on rank 0, SettingsError where a place holds files of another run, and what
  /// require_writable() throws.
  void open(int64_t first_step);

  /// Before the first file a checkpoint is saved, unless one tells of this folder already: a job
  /// that is killed here and started again finds its own files.
  void save_best(int64_t steps_done);
  void save_last();

  /// "best and last in PATH"; empty where nothing was saved.
  std::string summary() const;

 private:
  void save(const std::string& name);
  void require_no_other(const std::string& saved_by, int64_t first_step) const;
  std::string setting() const;

  const ddp::Context& context_;
  ddp::Checkpointer& checkpointer_;
  const models::Qwen2Impl& module_;
  TrainedFolderOptions options_;
  bool saves_ = false;  // after open()
  int64_t first_step_ = 0;
  bool is_noted_ = false;  // by the checkpoint at first_step_
  TrainedFiles beside_ = {};
  std::string saved_ = "";
};

}  // namespace examples
