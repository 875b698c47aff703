// SPDX-License-Identifier: Apache-2.0
// Chooses the checkpoint that a run continues from, and loads it. All ranks choose the same one.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/core/launch_environment.hpp"
#include "ddp/train/checkpoint.hpp"
#include "train/checkpoint_files.hpp"
#include "train/checkpoint_texts.hpp"
#include "train/save_history.hpp"

namespace ddp::detail {

class CheckpointRestorer {
 public:
  /// What a restorer reads from and loads into. All of it must outlive the restorer.
  struct Parts {
    CheckpointDir& dir;
    CheckpointTexts& texts;
    const std::vector<StatefulRef>& objects;
  };
  CheckpointRestorer(ControlPlane& control_plane, at::Device device,
                     const CheckpointOptions& options, const LaunchEnvironment& launch,
                     const Parts& parts);

  /// Checkpointer::restore() without the report to the Context: the step of the loaded checkpoint,
  /// or nothing if the run starts at step 0. Collective.
  std::optional<SavedStep> restore();

 private:
  using Found = std::optional<std::pair<CheckpointFolder, Manifest>>;

  bool is_main() const { return control_plane_.rank() == 0; }
  bool reads_file(const std::string& name) const;
  std::vector<CheckpointFolder> agree_on_candidates();
  std::optional<Manifest> check_everywhere(const CheckpointFolder& folder);
  Found newest_whole(const std::vector<CheckpointFolder>& candidates);
  void load(const CheckpointFolder& folder, const Manifest& manifest);
  void log_loaded(const CheckpointFolder& folder, const Manifest& manifest) const;
  void warn_of_restart_at_zero() const;

  ControlPlane& control_plane_;
  const at::Device device_;
  const CheckpointOptions options_;
  const LaunchEnvironment launch_;
  CheckpointDir& dir_;
  CheckpointTexts& texts_;
  const std::vector<StatefulRef>& objects_;
};

}  // namespace ddp::detail
