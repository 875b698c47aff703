// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint_restorer.hpp"

#include <filesystem>
#include <map>

#include "core/rank_position.hpp"
#include "ddp/core/logging.hpp"
#include "train/checkpoint_exchange.hpp"
#include "train/snapshot.hpp"

namespace ddp::detail {
namespace {

// Whether a checkpoint can be loaded, as one rank sees it.
struct Verdict {
  bool is_newer = false;  // a newer program wrote it
  std::string damage;     // empty: it is whole
  friend auto message_fields(Verdict& verdict) {
    return std::tie(verdict.is_newer, verdict.damage);
  }
};

}  // namespace

CheckpointRestorer::CheckpointRestorer(ControlPlane& control_plane, at::Device device,
                                       const CheckpointOptions& options,
                                       const LaunchEnvironment& launch, const Parts& parts)
    : control_plane_(control_plane),
      device_(device),
      options_(options),
      launch_(launch),
      dir_(parts.dir),
      texts_(parts.texts),
      objects_(parts.objects) {}

bool CheckpointRestorer::reads_file(const std::string& name) const {
  return !name.starts_with("rank_") || name == rank_file_name(control_plane_.rank());
}

// Uses rank 0's list, because other nodes' views of a shared folder may lag.
std::vector<CheckpointFolder> CheckpointRestorer::agree_on_candidates() {
  const bool required = options_.resume == "require";
  const auto folders = broadcast_from_main(control_plane_, [&] {
    std::error_code ignored;
    const bool is_missing = !std::filesystem::exists(options_.dir, ignored);
    return dir_.open(/*leave_untouched=*/options_.read_only || (required && is_missing));
  });
  if (!options_.read_only && !(folders.empty() && required)) {
    dir_.require_writable(control_plane_);
  }
  return folders;
}

// The manifest if the checkpoint is complete on every rank; nothing if it is damaged on any rank.
std::optional<Manifest> CheckpointRestorer::check_everywhere(const CheckpointFolder& folder) {
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
      dir_.note_damaged(folder.name);
      if (is_main()) {
        log_warning(concat("skipped the checkpoint ", dir_.path_of(folder), ": ", damage,
                           " (seen by rank ", rank, ")"));
      }
      return std::nullopt;
    }
  }
  return manifest;
}

// The newest checkpoint that is complete on every rank and finite; without a finite one, the newest
// complete one. A model may contain inf permanently (a mask), so an older program's checkpoint must
// not always win.
CheckpointRestorer::Found CheckpointRestorer::newest_whole(
    const std::vector<CheckpointFolder>& candidates) {
  Found newest;
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
      log_warning(concat("the checkpoint ", dir_.path_of(folder),
                         " holds inf or NaN: a finite one is taken where there is one"));
    }
    if (!newest) {
      newest.emplace(folder, std::move(*manifest));
    }
  }
  return newest;
}

void CheckpointRestorer::load(const CheckpointFolder& folder, const Manifest& manifest) {
  const auto path = dir_.path_of(folder);
  std::map<std::string, TensorMap> files;
  for (const auto& file : manifest.files) {
    if (reads_file(file.name)) {
      files[file.name] = load_safetensors(path + "/" + file.name).tensors;
    }
  }
  try {
    restore_snapshot(objects_, manifest, files, control_plane_.rank(), device_, path);
  } catch (const MismatchError& error) {
    throw MismatchError(concat("the checkpoint ", path, " does not fit: ", error.what(),
                               "; fix: another checkpoint.dir, or the settings it was saved with"));
  }
  texts_.load(manifest.texts, path);
}

void CheckpointRestorer::log_loaded(const CheckpointFolder& folder,
                                    const Manifest& manifest) const {
  if (!is_main()) {
    return;
  }
  log_info(concat("resumed from ", dir_.path_of(folder), " after ", manifest.step, " steps"));
  if (manifest.world_size != control_plane_.world_size()) {
    log_warning(concat("it was saved by ", manifest.world_size, " ranks and is resumed by ",
                       control_plane_.world_size(),
                       ": random numbers differ from the undisturbed run's"));
  }
}

void CheckpointRestorer::warn_of_restart_at_zero() const {
  if (is_main() && launch_.restart_count > 0 && !options_.read_only) {
    log_warning(concat(
        "restart ", launch_.restart_count, " of job ", launch_.job_id, " begins at step 0: ",
        options_.dir.empty() ? std::string("checkpoint.dir is empty")
                             : concat("checkpoint.dir=", options_.dir, " holds no checkpoint"),
        "; fix: a checkpoint.dir that stays the same from start to start, and "
        "checkpoint.every_minutes below the time a start has"));
  }
}

std::optional<SavedStep> CheckpointRestorer::restore() {
  if (options_.dir.empty()) {
    warn_of_restart_at_zero();
    return std::nullopt;
  }
  const ActivityScope activity(control_plane_, "restore");
  const auto candidates = agree_on_candidates();
  if (options_.resume == "never" && !candidates.empty()) {
    throw SettingsError(concat("checkpoint.resume=never, but checkpoint.dir=", options_.dir,
                               " already holds ", candidates.front().name,
                               ": choose another folder, or checkpoint.resume=auto"));
  }
  if (const auto newest = newest_whole(candidates)) {
    const auto& [folder, manifest] = *newest;
    load(folder, manifest);
    log_loaded(folder, manifest);
    return SavedStep{manifest.step, manifest.metric.has_value()};
  }
  if (!candidates.empty()) {
    throw ReadError(concat("none of the ", candidates.size(), " checkpoints in ", options_.dir,
                           " is whole (see the warnings above); remove the folder to start anew"));
  }
  if (options_.resume == "require") {
    throw ReadError("checkpoint.resume=require, but there is no checkpoint in checkpoint.dir=" +
                    options_.dir);
  }
  warn_of_restart_at_zero();
  return std::nullopt;
}

}  // namespace ddp::detail
