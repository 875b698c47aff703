// SPDX-License-Identifier: Apache-2.0
#include "common/trained_folder.hpp"

#include <filesystem>
#include <optional>
#include <utility>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace examples {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFolderText = "trained_folder";
constexpr const char* kBest = "best";
constexpr const char* kLast = "last";

/// Returns the first place that is not empty.
std::optional<std::string> find_trained(const std::string& path) {
  for (const char* name : {kBest, kLast}) {
    const auto place = path + "/" + name;
    std::error_code failed;
    if (fs::is_directory(place, failed) && !fs::is_empty(place, failed)) {
      return place;
    }
  }
  return std::nullopt;
}

std::string text_of(const TrainedFolderOptions& options) {
  if (options.is_in_checkpoint_dir) {
    return "checkpoint.dir";
  }
  std::error_code failed;
  auto named = fs::absolute(options.path, failed).lexically_normal();
  if (!named.has_filename()) {  // "folder/" means "folder", also if it does not exist yet
    named = named.parent_path();
  }
  const auto path = fs::weakly_canonical(named, failed);
  return failed ? options.path : path.string();
}

}  // namespace

TrainedFolder::TrainedFolder(const ddp::Context& context, ddp::Checkpointer& checkpointer,
                             const models::Qwen2Impl& module, TrainedFolderOptions options)
    : context_(context),
      checkpointer_(checkpointer),
      module_(module),
      options_(std::move(options)) {}

void TrainedFolder::open(int64_t first_step) {
  // Rank 0 decides: the setting may differ between ranks.
  const auto now =
      context_.control_plane().broadcast(options_.path.empty() ? std::string() : text_of(options_));
  saves_ = !now.empty();
  if (!saves_) {
    return;
  }
  first_step_ = first_step;
  const auto saved_by = checkpointer_.text(kFolderText);
  // A checkpoint without this text is trusted.
  is_noted_ = first_step > 0 && (saved_by.empty() || saved_by == now);
  checkpointer_.set_text(kFolderText, now);
  if (!context_.is_main()) {
    return;
  }
  for (const char* name : {kBest, kLast}) {
    const auto place = options_.path + "/" + name;
    models::restore_replaced(place);
    require_writable(module_, place, options_.from.base_path, setting());
  }
  if (!is_noted_) {
    require_no_other(saved_by, first_step);
  }
  for (const char* name : {kBest, kLast}) {
    models::finish_interrupted_save(options_.path + "/" + name);
  }
  beside_ = read_trained_files(module_, options_.from);
}

std::string TrainedFolder::setting() const {
  return options_.is_in_checkpoint_dir ? "checkpoint.dir" : "lora.save_dir";
}

void TrainedFolder::require_no_other(const std::string& saved_by, int64_t first_step) const {
  const auto place = find_trained(options_.path);
  if (!place) {
    return;
  }
  const auto fix = ddp::concat("; fix: name another ", setting(), ", or move ", *place, " away");
  if (const auto other = models::find_other_file(*place)) {
    throw ddp::SettingsError(ddp::concat(setting(), ": ", *place, " holds ", *other,
                                         ", which no run writes there", fix));
  }
  throw ddp::SettingsError(
      ddp::concat(setting(), ": ", *place, " holds what another run trained, and this one ",
                  first_step == 0 ? "starts at step 0"
                                  : "goes on from a checkpoint whose run wrote to " + saved_by,
                  ": it would replace that", fix,
                  first_step == 0 ? ", or go on with that run: name its checkpoint.dir" : ""));
}

void TrainedFolder::save_best(int64_t steps_done) {
  if (!saves_) {
    return;
  }
  if (!is_noted_ && checkpointer_.last_saved_step() <= first_step_) {
    checkpointer_.save(steps_done - 1);
    try {
      checkpointer_.wait();
    } catch (const ddp::WriteError& error) {
      // Training continues, as after any failed checkpoint (checkpoint.max_failures). A `best` that
      // no checkpoint names would stop the job's next start.
      if (context_.is_main()) {
        ddp::log_warning(
            ddp::concat("best of step ", steps_done, " is not written: ", error.what()));
      }
      return;
    }
  }
  save(kBest);
}

void TrainedFolder::save_last() {
  if (saves_) {
    save(kLast);
  }
}

void TrainedFolder::save(const std::string& name) {
  if (context_.is_main()) {
    save_trained(module_, options_.path + "/" + name, options_.from, beside_);
  }
  if (saved_.find(name) == std::string::npos) {
    saved_ += (saved_.empty() ? "" : " and ") + name;
  }
}

std::string TrainedFolder::summary() const {
  return saved_.empty() ? "" : saved_ + " in " + options_.path;
}

}  // namespace examples
