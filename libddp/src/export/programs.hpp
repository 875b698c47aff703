// SPDX-License-Identifier: Apache-2.0
// The programs of an archive, ready to run in each mode.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "export/archive.hpp"
#include "export/call_arguments.hpp"
#include "export/graph.hpp"
#include "export/graph_plan.hpp"
#include "export/guards.hpp"
#include "export/input_shapes.hpp"

namespace ddp::detail {

/// A program of one mode. Its parts refer to `program`, so it stays where it is made.
struct ModeProgram {
  ExportedProgram program;
  CallArguments arguments;
  InputShapes shapes;
  Guards guards;
  GraphPlan plan;
  std::string constants_of;         ///< the program of the archive whose constants it uses
  std::set<std::string> rewritten;  ///< buffers and parameters whose new values it returns

  ModeProgram(ExportedProgram program_in, std::string constants_of_in)
      : program(std::move(program_in)),
        arguments(program),
        shapes(program),
        guards(program),
        plan(program.graph),
        constants_of(std::move(constants_of_in)) {
    for (const auto& output : program.outputs) {
      if (output.kind != OutputKind::User) {
        rewritten.insert(output.target);
      }
    }
  }
  ModeProgram(const ModeProgram&) = delete;
  ModeProgram& operator=(const ModeProgram&) = delete;
};

/// Clones of a module share it.
class Programs {
 public:
  /// Reads the program "model" (or "train", or the only one), and "eval" if there is one. Throws
  /// DataError; that of a program's text names the file. `checkpoint_blocks`: see
  /// ExportedModuleOptions.
  explicit Programs(Pt2Archive& archive, std::vector<std::string> checkpoint_blocks = {});
  /// Changes a program, whose mode is the second argument.
  using Change = std::function<void(ExportedProgram&, bool)>;
  /// Changed copies of the programs as the archive has them. They have its modes.
  Programs(std::shared_ptr<const Programs> original, const Change& change);

  const std::string& path() const { return path_; }
  const std::string& main_name() const { return main_name_; }
  const ExportedProgram& main() const { return main_; }
  bool is_training() const { return is_training_; }  ///< the mode of the main program
  /// Prepared at the first call for a mode. Throws SettingsError if the archive lacks the mode,
  /// and for a pattern of checkpoint_blocks that matches nothing. `fused`: with ddp::ops (fuse()).
  const ModeProgram& of_mode(bool training, bool fused = false) const;
  const std::optional<ExportedProgram>& eval_program() const { return eval_; }

 private:
  const ModeProgram& prepared(bool training, bool fused) const;
  std::unique_ptr<const ModeProgram> prepare(bool training, bool fused) const;

  std::string path_, main_name_;
  std::vector<std::string> checkpoint_blocks_;
  ExportedProgram main_;
  std::optional<ExportedProgram> eval_;
  bool is_training_ = true;
  std::shared_ptr<const Programs> original_;  // of changed programs
  mutable std::mutex mutex_;
  mutable std::unique_ptr<const ModeProgram> modes_[2][2];  // by training and fused
};

}  // namespace ddp::detail
