// SPDX-License-Identifier: Apache-2.0
#include "language/trained_folder.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "models/pretrained/hf_config.hpp"
#include "models/pretrained/peft_adapter.hpp"

namespace examples {
namespace {

namespace fs = std::filesystem;

bool has_adapters(const torch::nn::Module& module) {
  const auto modules = module.modules();
  return std::any_of(modules.begin(), modules.end(), [](const auto& child) {
    const auto* linear = child->template as<models::LinearImpl>();
    return linear != nullptr && linear->has_lora();
  });
}

std::string reason() {
  return std::strerror(errno);
}

void require_folder(const std::string& folder, const std::string& base_path,
                    const std::string& setting) {
  const auto refuse = [&](const std::string& what) {
    throw ddp::SettingsError(setting + ": " + folder + what + "; fix: set another " + setting);
  };
  std::error_code failed;
  if (fs::exists(fs::symlink_status(folder, failed)) && !fs::is_directory(folder, failed)) {
    refuse(fs::exists(folder, failed) ? " is not a folder"
                                      : " is a link to a path that does not exist");
  }
  if (!base_path.empty() && fs::equivalent(folder, base_path, failed)) {
    refuse(" is the base of this run (model.path) and would be replaced");
  }
}

/// Throws before training if save_trained() would fail. Messages begin with `setting`. Leaves
/// `folder` unchanged.
void require_writable(const models::Qwen2Impl& module, const std::string& folder,
                      const std::string& base_path, const std::string& setting) {
  require_folder(folder, base_path, setting);
  const auto refuse = [&](const std::string& where, const std::string& why) {
    throw ddp::WriteError(setting + ": cannot write in " + where + ": " + why +
                          "; fix: set a folder that can be written");
  };
  std::error_code failed;
  const bool is_there = fs::is_directory(folder, failed);
  // For a link, the files are created next to the link's target.
  const fs::path parent = (is_there ? fs::canonical(folder) : fs::path(folder)).parent_path();
  fs::create_directories(parent, failed);
  if (failed) {
    refuse(parent, failed.message());
  }
  if (::access(parent.c_str(), W_OK | X_OK) != 0) {
    refuse(parent, reason());
  }
  if (is_there && ::access(folder.c_str(), R_OK | W_OK | X_OK) != 0) {
    refuse(folder, reason());
  }
  if (has_adapters(module)) {
    models::require_adapter_fits(module, folder);
  }
}

/// Returns nothing if `module` has adapters, because they name their base.
TrainedFolder::ModelFiles read_model_files(const models::Qwen2Impl& module,
                                           const TrainedFrom& from) {
  if (has_adapters(module)) {
    return {};
  }
  if (!from.base_path.empty()) {
    return {.files = models::read_model_files(from.base_path)};
  }
  return {.files = models::read_tokenizer_files(from.tokens_path), .end_tokens = from.end_tokens};
}

void save_trained(const models::Qwen2Impl& module, const std::string& folder,
                  const TrainedFrom& from, const TrainedFolder::ModelFiles& model_files) {
  if (has_adapters(module)) {
    models::save_adapter(module, folder, from.base_path, from.base_identity);
    return;
  }
  auto config = models::make_hf_config(module.options(), module.head_weight().scalar_type());
  config.eos_token_ids = model_files.end_tokens;
  models::save_pretrained(module, config, folder, {.files = model_files.files, .replace = true});
}

constexpr const char* kFolderText = "trained_folder";
constexpr const char* kBest = "best";
constexpr const char* kLast = "last";

/// Returns the first folder that is not empty.
std::optional<std::string> find_trained(const std::string& path) {
  for (const char* name : {kBest, kLast}) {
    const auto folder = path + "/" + name;
    std::error_code failed;
    if (fs::is_directory(folder, failed) && !fs::is_empty(folder, failed)) {
      return folder;
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
  is_recorded_ = first_step > 0 && (saved_by.empty() || saved_by == now);
  checkpointer_.set_text(kFolderText, now);
  if (!context_.is_main()) {
    return;
  }
  for (const char* name : {kBest, kLast}) {
    const auto folder = options_.path + "/" + name;
    models::restore_replaced(folder);
    require_writable(module_, folder, options_.from.base_path, setting());
  }
  if (!is_recorded_) {
    require_no_other(saved_by, first_step);
  }
  for (const char* name : {kBest, kLast}) {
    models::finish_interrupted_save(options_.path + "/" + name);
  }
  model_files_ = read_model_files(module_, options_.from);
}

std::string TrainedFolder::setting() const {
  return options_.is_in_checkpoint_dir ? "checkpoint.dir" : "lora.save_dir";
}

void TrainedFolder::require_no_other(const std::string& saved_by, int64_t first_step) const {
  const auto folder = find_trained(options_.path);
  if (!folder) {
    return;
  }
  const auto fix = ddp::concat("; fix: set another ", setting(), ", or move ", *folder, " away");
  if (const auto other = models::find_other_file(*folder)) {
    throw ddp::SettingsError(ddp::concat(setting(), ": ", *folder, " holds ", *other,
                                         ", which no run writes there", fix));
  }
  throw ddp::SettingsError(
      ddp::concat(setting(), ": ", *folder, " holds the weights of another run; this run ",
                  first_step == 0 ? "starts at step 0"
                                  : "resumes from a checkpoint whose run wrote to " + saved_by,
                  " and would replace them", fix,
                  first_step == 0 ? ", or resume the other run: set its checkpoint.dir" : ""));
}

void TrainedFolder::save_best(int64_t steps_done) {
  if (!saves_) {
    return;
  }
  if (!is_recorded_ && checkpointer_.last_saved_step() <= first_step_) {
    checkpointer_.save(steps_done - 1);
    try {
      checkpointer_.wait();
    } catch (const ddp::WriteError& error) {
      // Training continues, as after any failed checkpoint (checkpoint.max_failures). A `best` that
      // no checkpoint names would stop the job's next start.
      if (context_.is_main()) {
        ddp::log_warning(
            ddp::concat("the best model (step ", steps_done, ") is not saved: ", error.what()));
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
    save_trained(module_, options_.path + "/" + name, options_.from, model_files_);
  }
  if (saved_.find(name) == std::string::npos) {
    saved_ += (saved_.empty() ? "" : " and ") + name;
  }
}

std::string TrainedFolder::summary() const {
  return saved_.empty() ? "" : saved_ + " in " + options_.path;
}

}  // namespace examples
