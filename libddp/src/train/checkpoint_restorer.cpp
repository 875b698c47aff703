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

// One rank's check of a checkpoint.
struct Verdict {
  bool is_newer = false;  // a newer program wrote the checkpoint
  std::string damage;     // empty: the checkpoint is complete
  friend auto message_fields(Verdict& verdict) {
    return std::tie(verdict.is_newer, verdict.damage);
  }
};

class Restorer : private RestoreParts {
 public:
  explicit Restorer(const RestoreParts& parts) : RestoreParts(parts) {}

  std::optional<SavedStep> restore() {
    if (options.dir.empty()) {
      warn_of_restart_at_zero();
      return std::nullopt;
    }
    const ActivityScope activity(control_plane, "restore");
    const auto candidates = agree_on_candidates();
    if (options.resume == Resume::Never && !candidates.empty()) {
      throw SettingsError(concat("checkpoint.resume=never, but checkpoint.dir=", options.dir,
                                 " already holds ", candidates.front().name,
                                 "; fix: set another checkpoint.dir, or checkpoint.resume=auto"));
    }
    if (const auto newest = newest_complete(candidates)) {
      const auto& [folder, manifest] = *newest;
      load(folder, manifest);
      log_loaded(folder, manifest);
      return SavedStep{manifest.step, manifest.metric.has_value()};
    }
    if (!candidates.empty()) {
      throw ReadError(
          concat("none of the ", candidates.size(), " checkpoints in ", options.dir,
                 " is complete (see the warnings above); fix: remove the folder to start again"));
    }
    if (options.resume == Resume::Require) {
      throw ReadError("checkpoint.resume=require, but there is no checkpoint in checkpoint.dir=" +
                      options.dir);
    }
    warn_of_restart_at_zero();
    return std::nullopt;
  }

 private:
  using Found = std::optional<std::pair<CheckpointFolder, Manifest>>;

  bool is_main() const { return control_plane.rank() == 0; }
  bool reads_file(const std::string& name) const {
    return !name.starts_with("rank_") || name == rank_file_name(control_plane.rank());
  }

  // Uses rank 0's list, because other nodes' views of a shared folder may lag.
  std::vector<CheckpointFolder> agree_on_candidates() {
    const bool required = options.resume == Resume::Require;
    const auto folders = broadcast_from_main(control_plane, [&] {
      std::error_code ignored;
      const bool is_missing = !std::filesystem::exists(options.dir, ignored);
      return dir.open(/*leave_untouched=*/options.read_only || (required && is_missing));
    });
    if (!options.read_only && !(folders.empty() && required)) {
      dir.require_writable(control_plane);
    }
    return folders;
  }

  // The manifest if the checkpoint is complete on every rank; nothing if it is damaged on any rank.
  std::optional<Manifest> check_everywhere(const CheckpointFolder& folder) {
    Verdict verdict;
    std::optional<Manifest> manifest;
    try {
      manifest = check_checkpoint(options.dir, folder,
                                  [this](const std::string& name) { return reads_file(name); });
    } catch (const NewerFormatError& error) {
      verdict = {.is_newer = true, .damage = error.what()};
    } catch (const std::exception& error) {
      verdict.damage = error.what();
    }
    const auto verdicts = all_gather_messages(control_plane, verdict);
    for (std::size_t rank = 0; rank < verdicts.size(); ++rank) {
      const auto& [is_newer, damage] = verdicts[rank];
      if (is_newer) {
        throw ReadError(damage);
      }
      if (!damage.empty()) {
        dir.note_damaged(folder.name);
        if (is_main()) {
          log_warning(concat("skipped the checkpoint ", dir.path_of(folder), ": ", damage,
                             " (found by rank ", rank, ")"));
        }
        return std::nullopt;
      }
    }
    return manifest;
  }

  // The newest checkpoint that is complete on every rank and finite; without a finite one, the
  // newest complete one. Checkpoints of older programs have no finite flag. Such a checkpoint is
  // loaded only if it is the newest complete one, since a model may contain inf permanently (a
  // mask).
  Found newest_complete(const std::vector<CheckpointFolder>& candidates) {
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
        log_warning(concat("the checkpoint ", dir.path_of(folder),
                           " contains inf or NaN: a finite checkpoint is preferred"));
      }
      if (!newest) {
        newest.emplace(folder, std::move(*manifest));
      }
    }
    return newest;
  }

  void load(const CheckpointFolder& folder, const Manifest& manifest) {
    const auto path = dir.path_of(folder);
    std::map<std::string, TensorMap> files;
    for (const auto& file : manifest.files) {
      if (reads_file(file.name)) {
        files[file.name] = load_safetensors(path + "/" + file.name).tensors;
      }
    }
    try {
      restore_snapshot(objects, manifest, files, control_plane.rank(), device, path);
    } catch (const MismatchError& error) {
      throw MismatchError(
          concat("the checkpoint ", path, " does not fit: ", error.what(),
                 "; fix: set another checkpoint.dir, or use the settings of the saved run"));
    }
    texts.load(manifest.texts, path);
  }

  void log_loaded(const CheckpointFolder& folder, const Manifest& manifest) const {
    if (!is_main()) {
      return;
    }
    log_info(concat("resumed from ", dir.path_of(folder), " after ", manifest.step, " steps"));
    if (manifest.world_size != control_plane.world_size()) {
      log_warning(concat("the checkpoint was saved by ", manifest.world_size,
                         " ranks and is resumed by ", control_plane.world_size(),
                         ": training continues with other random numbers (dropout, augmentation)"));
    }
  }

  void warn_of_restart_at_zero() const {
    if (is_main() && launch.restart_count > 0 && !options.read_only) {
      log_warning(concat(
          "restart ", launch.restart_count, " of job ", launch.job_id, " begins at step 0: ",
          options.dir.empty() ? std::string("checkpoint.dir is empty")
                              : concat("checkpoint.dir=", options.dir, " holds no checkpoint"),
          "; fix: set the same checkpoint.dir for all starts of the job, and "
          "checkpoint.every_minutes below the time limit of a start"));
    }
  }
};

}  // namespace

std::optional<SavedStep> restore_checkpoint(const RestoreParts& parts) {
  return Restorer(parts).restore();
}

}  // namespace ddp::detail
