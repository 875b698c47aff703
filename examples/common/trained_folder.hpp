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
  std::string path = "";              ///< rank 0's value is used; empty: nothing is saved
  bool is_in_checkpoint_dir = false;  ///< the default path, which moves with that folder
  TrainedFrom from = {};
};

/// Saves a run's trained model to PATH/best and PATH/last and never replaces other files. A run
/// that starts at step 0 needs both places empty. A resumed run may find its own files, which its
/// checkpoint names. Other files in PATH stay. All methods are collective; rank 0 writes.
class TrainedFolder {
 public:
  /// All arguments outlive this object.
  TrainedFolder(const ddp::Context& context, ddp::Checkpointer& checkpointer,
                const models::Qwen2Impl& module, TrainedFolderOptions options);

  /// Call it with the `first_step` of Checkpointer::restore. Records the folder for later
  /// checkpoints. Throws on rank 0: SettingsError if a place holds files of another run, and the
  /// errors of require_writable().
  void open(int64_t first_step);

  /// Saves a checkpoint before the first file, unless one names this folder already. A job that is
  /// killed here and restarted then recognises its own files.
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
  bool saves_ = false;  // set by open()
  int64_t first_step_ = 0;
  bool is_noted_ = false;  // in the checkpoint at first_step_
  TrainedFiles beside_ = {};
  std::string saved_ = "";
};

}  // namespace examples
