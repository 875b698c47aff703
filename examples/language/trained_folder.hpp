// SPDX-License-Identifier: Apache-2.0
// Saving of trained adapters or models, which never replaces other files.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ddp/comm/context.hpp"
#include "ddp/train/checkpoint.hpp"
#include "models/pretrained/hf_weights.hpp"
#include "models/qwen2.hpp"

namespace examples {

/// Origin of a trained model.
struct TrainedFrom {
  std::string base_path = "";            ///< model.path; empty: random weights
  std::string base_identity = "";        ///< argument of models::save_adapter()
  std::string tokens_path = "";          ///< folder of the token files
  std::vector<int64_t> end_tokens = {};  ///< of the token files
};

struct TrainedFolderOptions {
  std::string path = "";              ///< rank 0's value is used; empty: nothing is saved
  bool is_in_checkpoint_dir = false;  ///< the default path, which moves with that folder
  TrainedFrom from = {};
};

/// Saves a run's trained model to PATH/best and PATH/last: the adapters in PEFT's layout if it has
/// them (with `from` as their base), else the whole model in Hugging Face's.
///
/// Files of other runs are never replaced. A run that starts at step 0 needs both folders empty. A
/// resumed run may find its own files, which its checkpoint names; they are replaced once the new
/// ones are complete. Other files in PATH stay. All methods are collective; rank 0 writes.
class TrainedFolder {
 public:
  /// All arguments outlive this object.
  TrainedFolder(const ddp::Context& context, ddp::Checkpointer& checkpointer,
                const models::Qwen2Impl& module, TrainedFolderOptions options);

  /// Call it with the `first_step` of Checkpointer::restore. Records the folder for later
  /// checkpoints. Throws on rank 0 if saving would fail or replace other files: WriteError if a
  /// folder cannot be written, SettingsError if it holds files of another run, another adapter or
  /// the base itself.
  void open(int64_t first_step);

  /// Saves a checkpoint before the first file, unless one names this folder already. A job that is
  /// killed here and restarted then recognises its own files.
  void save_best(int64_t steps_done);
  void save_last();

  /// "best and last in PATH"; empty where nothing was saved.
  std::string summary() const;

  /// Files and tokens that a saved whole model needs in addition to its weights.
  struct ModelFiles {
    models::ModelFiles files = {};  ///< the base's, else the tokenizer files of the token files
    std::vector<int64_t> end_tokens = {};  ///< used if the base names none
  };

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
  bool is_recorded_ = false;  // by the checkpoint at first_step_
  ModelFiles model_files_ = {};
  std::string saved_ = "";
};

}  // namespace examples
