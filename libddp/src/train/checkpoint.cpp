// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/checkpoint.hpp"

#include <exception>
#include <filesystem>
#include <set>

#include "core/rank_position.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/core/stop_signal.hpp"
#include "train/changed_settings.hpp"
#include "train/checkpoint_exchange.hpp"

namespace ddp {
namespace detail {
namespace {

// Whether a checkpoint can be loaded, as one rank sees it.
struct Verdict {
  bool is_newer = false;  // a newer program wrote it
  std::string damage;     // empty: it is whole
  friend auto message_fields(Verdict& verdict) {
    return std::tie(verdict.is_newer, verdict.damage);
  }
};

void check_names(const std::vector<StatefulRef>& objects) {
  std::set<std::string> names;
  for (const auto& object : objects) {
    const auto name = object.name();
    const bool plain = !name.empty() && name.find_first_not_of(
                                            "abcdefghijklmnopqrstuvwxyz"
                                            "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                            "0123456789_-") == std::string::npos;
    if (!plain || name.starts_with("rank_") || name == "rng") {
      throw SettingsError("a Checkpointer's object is named '" + name +
                          "': a name has letters, digits, '_' and '-', and is neither "
                          "'rng' nor starts with 'rank_'");
    }
    if (!names.insert(name).second) {
      throw SettingsError("two of a Checkpointer's objects are named '" + name +
                          "'; fix: name one in the list, {\"other_" + name + "\", object}");
    }
  }
}

}  // namespace

CheckpointerImpl::CheckpointerImpl(ControlPlane& control_plane, at::Device device,
                                   const CheckpointOptions& options,
                                   std::vector<StatefulRef> objects, FileOps& ops)
    : control_plane_(control_plane),
      rank_(control_plane.rank()),
      device_(device),
      options_(options),
      objects_(std::move(objects)),
      ops_(ops),
      stop_check_(stop_requested),
      exceptions_(std::uncaught_exceptions()) {
  options.taken.set();
  check_names(objects_);
  if (!options.settings_text.empty()) {
    texts_["settings"] = options.settings_text;
  }
  if (!options.plan_text.empty()) {
    texts_["plan"] = options.plan_text;
  }
}

CheckpointerImpl::~CheckpointerImpl() {
  try {
    if (std::uncaught_exceptions() == exceptions_) {
      const ActivityScope activity(control_plane_, "save");
      finish_pending();
      if (unsaved_) {
        defer_failure(*unsaved_);
      }
    } else {
      // Peers may be gone: no exchange. The next run removes the folder without a manifest.
      writer_.wait();
    }
  } catch (const SaveFailure& failure) {
    defer_failure(failure);
    if (defer_failure_ && is_main()) {
      log_error(failure.what());
    }
  } catch (const std::exception& error) {
    log_error(std::string("the last checkpoint was not saved: ") + error.what());
  }
}

void CheckpointerImpl::defer_failure(const SaveFailure& failure) const {
  if (defer_failure_) {
    defer_failure_(failure.cause());
  } else {
    log_error(failure.what());  // made from a ControlPlane: nobody else reports it
  }
}

// On rank 0. Reports a folder that cannot be made or written before training, not at the first
// save.
void CheckpointerImpl::own_folder() {
  const auto words = concat("checkpoint.dir=", options_.dir);
  try {
    make_folders(ops_, options_.dir);
    owner_ = FolderOwner::take(ops_, {.path = options_.dir,
                                      .words = words,
                                      .fix = "name another checkpoint.dir",
                                      .job = launch_.job_id});
  } catch (const FileError& error) {
    throw WriteError(concat(words, ": ", error.what(), kOtherFolder));
  }
}

// Nodes may mount the folder differently. Rank 0 has written its record.
void CheckpointerImpl::require_writable() {
  std::string reason;
  if (!is_main()) {
    try {
      try_writing(ops_, options_.dir);
    } catch (const FileError& error) {
      reason = error.what();
    }
  }
  const auto reasons = control_plane_.all_gather(reason);
  for (std::size_t rank = 0; rank < reasons.size(); ++rank) {
    if (!reasons[rank].empty()) {
      throw SaveFailure(static_cast<int>(rank), concat("checkpoint.dir=", options_.dir, ": rank ",
                                                       rank, " ", reasons[rank], kOtherFolder));
    }
  }
}

// On rank 0.
std::vector<CheckpointFolder> CheckpointerImpl::find_candidates() {
  auto folders = list_checkpoints(options_.dir);
  std::error_code ignored;
  if (!options_.read_only &&
      (options_.resume != "require" || std::filesystem::exists(options_.dir, ignored))) {
    own_folder();
    remove_stale_saves(ops_, options_.dir);
    folders = list_checkpoints(options_.dir);  // the previous owner may have saved until now
  }
  return folders;
}

// Uses rank 0's list, because other nodes' views of a shared folder may lag.
std::vector<CheckpointFolder> CheckpointerImpl::agree_on_candidates() {
  const auto folders = broadcast_from_main(control_plane_, [&] { return find_candidates(); });
  if (!options_.read_only && !(folders.empty() && options_.resume == "require")) {
    require_writable();
  }
  return folders;
}

void CheckpointerImpl::tell_changed_settings(const std::string& checkpoint,
                                             const std::string& saved,
                                             const std::string& now) const {
  if (!is_main()) {
    return;
  }
  for (const auto& change : changed_settings(saved, now, options_.default_settings_text)) {
    log_warning(concat("another setting than ", checkpoint, " was saved with: ", change));
  }
}

bool CheckpointerImpl::reads_file(const std::string& name) const {
  return !name.starts_with("rank_") || name == rank_file_name(rank_);
}

// The manifest if the checkpoint is complete on every rank; nothing if it is damaged on any rank.
std::optional<Manifest> CheckpointerImpl::check_everywhere(const CheckpointFolder& folder) {
  Verdict verdict;
  std::optional<Manifest> manifest;
  try {
    manifest = check_checkpoint(options_.dir, folder,
                                [this](const std::string& name) { return reads_file(name); });
  } catch (const NewerFormatError& error) {
    verdict = {.is_newer = true, .damage = error.what()};
  } catch (const std::exception& error) {
    verdict.damage = error.what();
  }
  const auto verdicts = all_gather_messages(control_plane_, verdict);
  for (std::size_t rank = 0; rank < verdicts.size(); ++rank) {
    const auto& [is_newer, damage] = verdicts[rank];
    if (is_newer) {
      throw ReadError(damage);
    }
    if (!damage.empty()) {
      damaged_.insert(folder.name);
      if (is_main()) {
        log_warning(concat("skipped the checkpoint ", path_of(folder), ": ", damage,
                           " (seen by rank ", rank, ")"));
      }
      return std::nullopt;
    }
  }
  return manifest;
}

void CheckpointerImpl::load(const CheckpointFolder& folder, const Manifest& manifest) {
  std::map<std::string, TensorMap> files;
  for (const auto& file : manifest.files) {
    if (reads_file(file.name)) {
      files[file.name] = load_safetensors(path_of(folder) + "/" + file.name).tensors;
    }
  }
  try {
    restore_snapshot(objects_, manifest, files, rank_, device_, path_of(folder));
  } catch (const MismatchError& error) {
    throw MismatchError(concat("the checkpoint ", path_of(folder), " does not fit: ", error.what(),
                               "; fix: another checkpoint.dir, or the settings it was saved with"));
  }
  const auto plan_and_settings = texts_;
  texts_ = manifest.texts;
  // Later checkpoints are saved with this run's settings; the plan is pinned.
  if (const auto it = plan_and_settings.find("settings"); it != plan_and_settings.end()) {
    tell_changed_settings(path_of(folder), texts_["settings"], it->second);
    texts_["settings"] = it->second;
  }
  const auto communicator = communicator_.lock();
  if (const auto plan = texts_.find("plan");
      plan != texts_.end() && communicator != nullptr && !options_.read_only) {
    try {
      communicator->adopt_plan(plan->second, path_of(folder));
    } catch (const ReadError& error) {  // on all ranks; nothing of the run depends on it
      if (is_main()) {
        log_warning(concat("the measured choices in ", path_of(folder),
                           " cannot be read, they are measured anew: ", error.what()));
      }
    }
  }
}

// The newest checkpoint that is complete on every rank and finite; without a finite one, the newest
// complete one. A model may contain inf permanently (a mask), so an older program's checkpoint must
// not always win.
std::optional<std::pair<CheckpointFolder, Manifest>> CheckpointerImpl::newest_whole(
    const std::vector<CheckpointFolder>& candidates) {
  std::optional<std::pair<CheckpointFolder, Manifest>> newest;
  for (const auto& folder : candidates) {
    auto manifest = check_everywhere(folder);
    if (!manifest) {
      continue;
    }
    const bool is_newest = !newest.has_value();
    if (manifest->finite && (manifest->finite_is_known || is_newest)) {
      return std::pair(folder, std::move(*manifest));
    }
    if (is_main() && !manifest->finite) {
      log_warning(concat("the checkpoint ", path_of(folder),
                         " holds inf or NaN: a finite one is taken where there is one"));
    }
    if (!newest) {
      newest.emplace(folder, std::move(*manifest));
    }
  }
  return newest;
}

void CheckpointerImpl::tell_start_anew() const {
  if (is_main() && launch_.restart_count > 0 && !options_.read_only) {
    log_warning(concat("restart ", launch_.restart_count, " of job ", launch_.job_id,
                       " begins at step 0: ",
                       enabled() ? concat("checkpoint.dir=", options_.dir, " holds no checkpoint")
                                 : std::string("checkpoint.dir is empty"),
                       "; fix: a checkpoint.dir that stays the same from start to start, and "
                       "checkpoint.every_minutes below the time a start has"));
  }
}

int64_t CheckpointerImpl::restore() {
  if (!enabled()) {
    tell_start_anew();
    return 0;
  }
  const ActivityScope activity(control_plane_, "restore");
  const auto candidates = agree_on_candidates();
  if (options_.resume == "never" && !candidates.empty()) {
    throw SettingsError(concat("checkpoint.resume=never, but checkpoint.dir=", options_.dir,
                               " already holds ", candidates.front().name,
                               ": choose another folder, or checkpoint.resume=auto"));
  }
  const auto newest = newest_whole(candidates);
  if (newest) {
    const auto& [folder, manifest] = *newest;
    load(folder, manifest);
    last_saved_step_ = manifest.step;
    last_saved_has_metric_ = manifest.metric.has_value();
    if (is_main()) {
      log_info(concat("resumed from ", path_of(folder), " after ", manifest.step, " steps"));
      if (manifest.world_size != control_plane_.world_size()) {
        log_warning(concat("it was saved by ", manifest.world_size, " ranks and is resumed by ",
                           control_plane_.world_size(),
                           ": random numbers differ from the undisturbed run's"));
      }
    }
    return manifest.step;
  }
  if (!candidates.empty()) {
    throw ReadError(concat("none of the ", candidates.size(), " checkpoints in ", options_.dir,
                           " is whole (see the warnings above); remove the folder to start anew"));
  }
  if (options_.resume == "require") {
    throw ReadError("checkpoint.resume=require, but there is no checkpoint in checkpoint.dir=" +
                    options_.dir);
  }
  tell_start_anew();
  return 0;
}

}  // namespace detail

Checkpointer::Checkpointer(const Context& context, const CheckpointOptions& options,
                           std::initializer_list<StatefulRef> objects)
    : Checkpointer(context.control_plane(), context.device(), options, objects) {
  impl_->set_communicator(context.communicator());
  impl_->set_launch(context.launch());
  impl_->set_announce([&context](int64_t step) { context.set_progress(step, ""); });
  impl_->set_defer_failure([&context](const FailureCause& cause) { context.defer_failure(cause); });
}

Checkpointer::Checkpointer(ControlPlane& control_plane, at::Device device,
                           const CheckpointOptions& options,
                           std::initializer_list<StatefulRef> objects)
    : impl_(std::make_unique<detail::CheckpointerImpl>(control_plane, device, options,
                                                       std::vector<StatefulRef>(objects))) {}

Checkpointer::~Checkpointer() = default;

int64_t Checkpointer::restore() {
  const int64_t next_step = impl_->restore();
  impl_->announce(next_step);
  return next_step;
}
void Checkpointer::save_if_due(int64_t step) {
  DDP_CHECK(!impl_->is_read_only());
  impl_->save_if_due(step);
}
void Checkpointer::save(int64_t step, std::optional<double> metric) {
  DDP_CHECK(!impl_->is_read_only());
  impl_->save(step, metric);
}
void Checkpointer::wait() {
  impl_->wait();
}
int64_t Checkpointer::last_saved_step() const {
  return impl_->last_saved_step();
}

void Checkpointer::set_text(const std::string& name, const std::string& text) {
  impl_->texts()[name] = text;
}

std::string Checkpointer::text(const std::string& name) const {
  const auto& texts = impl_->texts();
  const auto found = texts.find(name);
  return found == texts.end() ? "" : found->second;
}

void Checkpointer::set_stop_check(std::function<bool()> stop_check) {
  impl_->set_stop_check(std::move(stop_check));
}

void Checkpointer::set_before_save(std::function<std::string()> why_not_finite) {
  impl_->set_before_save(std::move(why_not_finite));
}

void Checkpointer::set_before_stop(std::function<void(int64_t)> before_stop) {
  impl_->set_before_stop(std::move(before_stop));
}

}  // namespace ddp
