// SPDX-License-Identifier: Apache-2.0
#include "export/programs.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "export/checkpoint_blocks.hpp"
#include "export/fusion/fusion.hpp"
#include "export/json_access.hpp"
#include "export/training_mode.hpp"

namespace ddp::detail {
namespace {

constexpr std::size_t kMaxProgramBytes = std::size_t{1} << 30;
constexpr std::size_t kMaxModeBytes = 16;
constexpr const char* kEval = "eval";
constexpr const char* kModeEntry = "extra/libddp_mode";

std::string choose_main(const Pt2Archive& archive) {
  const auto names = archive.programs();
  for (const char* name : {"model", "train"}) {
    if (std::find(names.begin(), names.end(), name) != names.end()) {
      return name;
    }
  }
  if (names.size() != 1) {
    throw DataError(concat(archive.path(), " has ", names.size(),
                           " programs, and none is named model or train"));
  }
  return names[0];
}

ExportedProgram read(Pt2Archive& archive, const std::string& name) {
  const auto entry = "models/" + name + ".json";
  try {
    return read_program(archive.text(entry, kMaxProgramBytes));
  } catch (const ReadError& error) {
    throw DataError(concat(archive.path(), ", ", entry, ": ", error.what()));
  } catch (const DataError& error) {
    throw DataError(concat(archive.path(), ", ", entry, ": ", error.what()));
  } catch (const nlohmann::json::exception& error) {
    throw DataError(concat(archive.path(), ", ", entry, " is damaged: ", printable(error.what())));
  }
}

// Whether the main program trains. libddp's exporter writes its mode into the archive.
bool is_training_program(Pt2Archive& archive, const ExportedProgram& program) {
  if (!archive.has(kModeEntry)) {
    return is_training_graph(program.graph, true);
  }
  const auto mode = archive.text(kModeEntry, kMaxModeBytes);
  if (mode != "train" && mode != kEval && mode != "both") {
    throw DataError(concat(archive.path(), ", ", kModeEntry, " is ", printable(mode),
                           ", and libddp knows train, eval and both"));
  }
  return mode != kEval;
}

void warn_of_guards(const Guards& guards, const std::string& path) {
  for (const auto& guard : guards.unreadable()) {
    log_warning(concat(path, ": the export holds only while ", printable(guard.substr(0, 300)),
                       ". libddp cannot read this, so it is not checked, and inputs that break it "
                       "give other numbers than in Python"));
  }
}

void log_fused(const std::map<std::string, int>& fused, bool training, const std::string& path) {
  std::string text;
  for (const auto& [op, count] : fused) {
    text += concat(text.empty() ? "" : ", ", count, ' ', op);
  }
  log_info(concat(path, ": fuse ", text.empty() ? "found nothing to replace" : "replaced ", text,
                  training ? " (training)" : " (evaluation)"));
}

// `counts` are the matches of each pattern in the program.
void require_matches(const std::vector<int>& counts, const std::vector<std::string>& patterns,
                     const ExportedProgram& program) {
  const auto unmatched = std::find(counts.begin(), counts.end(), 0);
  if (unmatched == counts.end()) {
    return;
  }
  std::set<std::string> modules;
  for (const auto& node : program.graph.nodes) {
    if (!node.module.empty()) {
      modules.insert(node.module);
    }
  }
  std::string some;
  for (auto module = modules.begin(); module != modules.end(); ++module) {
    some += concat(some.empty() ? "" : ", ", printable(*module));
    if (some.size() > 200) {
      some += ", …";
      break;
    }
  }
  const auto& pattern = patterns[static_cast<std::size_t>(unmatched - counts.begin())];
  throw SettingsError(
      concat("checkpoint_blocks: ", printable(pattern),
             " matches no module outside of other patterns' blocks; the program has: ",
             some.empty() ? "none" : some, "; fix: name one of these, or remove the pattern"));
}

// A program must not write what it does not have.
void check_mutations(const ExportedProgram& program, const std::set<std::string>& state) {
  for (const auto& output : program.outputs) {
    if (output.kind != OutputKind::User && state.count(output.target) == 0) {
      throw DataError("the program writes the unknown tensor " + printable(output.target));
    }
  }
}

std::set<std::string> state_of(const ExportedProgram& program) {
  std::set<std::string> names;
  for (const auto& input : program.inputs) {
    if (input.is_state()) {
      names.insert(input.target);
    }
  }
  return names;
}

}  // namespace

Programs::Programs(Pt2Archive& archive, std::vector<std::string> checkpoint_blocks)
    : path_(archive.path()),
      main_name_(choose_main(archive)),
      checkpoint_blocks_(std::move(checkpoint_blocks)),
      main_(read(archive, main_name_)) {
  const auto known = state_of(main_);
  check_mutations(main_, known);
  is_training_ = is_training_program(archive, main_);
  if (main_name_ == kEval || !archive.has(concat("models/", kEval, ".json"))) {
    return;
  }
  eval_ = read(archive, kEval);
  is_training_ = true;  // the other program's mode
  check_mutations(*eval_, known);
  for (const auto& name : state_of(*eval_)) {
    if (known.count(name) == 0) {
      throw DataError(concat("the program ", kEval, " has the tensor ", printable(name), ", and ",
                             main_name_, " lacks it"));
    }
  }
}

Programs::Programs(std::shared_ptr<const Programs> original, const Change& change)
    : path_(original->path_),
      main_name_(original->main_name_),
      checkpoint_blocks_(original->checkpoint_blocks_),
      main_(original->main_),
      eval_(original->eval_),
      is_training_(original->is_training_),
      original_(std::move(original)) {
  change(main_, is_training_);
  if (eval_) {
    change(*eval_, false);
  }
}

const ModeProgram& Programs::of_mode(bool training, bool fused) const {
  const std::lock_guard lock(mutex_);
  return prepared(training, fused);
}

const ModeProgram& Programs::prepared(bool training, bool fused) const {
  auto& mode = modes_[training ? 1 : 0][fused ? 1 : 0];
  if (!mode) {
    if (fused) {
      prepared(training, false);  // fuse() takes only graphs that GraphPlan accepts
    }
    mode = prepare(training, fused);
  }
  return *mode;
}

std::unique_ptr<const ModeProgram> Programs::prepare(bool training, bool fused) const {
  if (original_) {
    original_->of_mode(training);  // operators of a change say nothing about the archive's modes
  }
  try {
    const bool is_main = training || !eval_;
    const bool is_as_exported = !is_main || training == is_training_;
    auto program = !is_main ? *eval_ : is_as_exported ? main_ : with_mode(main_, training);
    const auto counts = checkpoint_blocks(program, checkpoint_blocks_);
    if (is_main) {
      require_matches(counts, checkpoint_blocks_, main_);
    }
    if (fused) {
      log_fused(fuse(program), training, path_);
    }
    auto mode =
        std::make_unique<const ModeProgram>(std::move(program), is_main ? main_name_ : kEval);
    if (is_as_exported && !original_ && !fused) {  // else another program has warned
      warn_of_guards(mode->guards, path_);
    }
    return mode;
  } catch (const DataError& error) {
    throw DataError(concat(path_, ": ", error.what()));
  } catch (const SettingsError& error) {
    throw SettingsError(concat(path_, ": ", error.what()));
  }
}

}  // namespace ddp::detail
