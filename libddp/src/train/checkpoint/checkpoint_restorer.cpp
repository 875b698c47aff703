// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint/checkpoint_restorer.hpp"

#include <algorithm>
#include <filesystem>
#include <map>

#include "core/control/rank_position.hpp"
#include "ddp/core/logging.hpp"
#include "train/checkpoint/checkpoint_exchange.hpp"
#include "train/checkpoint/snapshot.hpp"

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
      if (options.resume == Resume::Require || is_best()) {
        throw SettingsError(concat("checkpoint.resume=", is_best() ? "best" : "require",
                                   ", but checkpoint.dir is empty; fix: set checkpoint.dir to the "
                                   "folder of the run that saved"));
      }
      warn_of_restart_at_zero();
      return std::nullopt;
    }
    const ActivityScope activity(control_plane, "restore");
    if (is_best() && options.keep_best == KeepBest::Off) {
      throw SettingsError(
          "checkpoint.resume=best needs to know which metric is better; fix: set "
          "checkpoint.keep_best=min or max, as in the run that saved");
    }
    const auto candidates = agree_on_candidates();
    if (options.resume == Resume::Never && !candidates.empty()) {
      throw SettingsError(concat("checkpoint.resume=never, but checkpoint.dir=", options.dir,
                                 " already holds ", candidates.front().name,
                                 "; fix: set another checkpoint.dir, or checkpoint.resume=auto"));
    }
    if (const auto chosen = first_usable(candidates)) {
      const auto& [folder, manifest] = *chosen;
      require_same_direction(folder, manifest);
      const auto other_steps = describe_other_steps(folder, manifest);
      if (options.same_steps && !other_steps.empty()) {
        throw SettingsError(other_steps + ", or start over in another checkpoint.dir");
      }
      const auto unused = load(folder, manifest);
      log_loaded(folder, manifest, unused, other_steps);
      return SavedStep{manifest.step, manifest.metric.has_value()};
    }
    if (!candidates.empty()) {
      throw ReadError(
          concat("none of the ", candidates.size(), " checkpoints in ", options.dir,
                 " is complete (see the warnings above); fix: remove the folder to start again"));
    }
    if (options.resume == Resume::Require) {
      // A program that only reads requires a checkpoint, whatever its user has set.
      throw ReadError(concat(options.read_only ? "" : "checkpoint.resume=require, but ",
                             "there is no checkpoint in checkpoint.dir=", options.dir,
                             "; fix: set the folder of the run that saved"));
    }
    if (is_best()) {
      throw ReadError(
          concat("checkpoint.resume=best, but no checkpoint in checkpoint.dir=", options.dir,
                 " has a metric; fix: save with checkpoint.keep_best and a metric "
                 "(Checkpointer::save), or set checkpoint.resume=require for the newest one"));
    }
    warn_of_restart_at_zero();
    return std::nullopt;
  }

 private:
  using Found = std::optional<std::pair<CheckpointFolder, Manifest>>;

  bool is_main() const { return control_plane.rank() == 0; }
  bool is_best() const { return options.resume == Resume::Best; }
  bool reads_file(const std::string& name) const {
    return !name.starts_with("rank_") || name == rank_file_name(control_plane.rank());
  }

  // Uses rank 0's list, because other nodes' views of a shared folder may lag.
  std::vector<CheckpointFolder> agree_on_candidates() {
    const bool required = options.resume == Resume::Require;
    const auto folders = broadcast_from_main(control_plane, [&] {
      std::error_code ignored;
      const bool is_missing = !std::filesystem::exists(options.dir, ignored);
      const auto found =
          dir.open(/*leave_untouched=*/options.read_only || (required && is_missing));
      return is_best() ? best_first(options, found) : found;
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
        dir.record_damaged(folder.name);
        if (is_main()) {
          log_warning(concat("skipped the checkpoint ", dir.path_of(folder), ": ", damage,
                             " (found by rank ", rank, ")"));
        }
        return std::nullopt;
      }
    }
    return manifest;
  }

  // The first checkpoint that is complete on every rank and finite; without a finite one, the
  // first complete one. Checkpoints of older programs have no finite flag. Such a checkpoint is
  // loaded only if it is the first complete one, since a model may contain inf permanently (a
  // mask).
  Found first_usable(const std::vector<CheckpointFolder>& candidates) {
    Found first;
    for (const auto& folder : candidates) {
      auto manifest = check_everywhere(folder);
      if (!manifest) {
        continue;
      }
      const bool is_first = !first.has_value();
      if (manifest->finite && (manifest->finite_is_known || is_first)) {
        return std::pair(folder, std::move(*manifest));
      }
      if (is_main() && !manifest->finite) {
        log_warning(concat("the checkpoint ", dir.path_of(folder),
                           " contains inf or NaN: a finite checkpoint is preferred"));
      }
      if (!first) {
        first.emplace(folder, std::move(*manifest));
      }
    }
    return first;
  }

  // With the other direction the best checkpoint would be the worst.
  void require_same_direction(const CheckpointFolder& folder, const Manifest& manifest) const {
    const std::string own = to_text(options.keep_best);
    const auto settings = manifest.texts.find("settings");
    const auto saved = manifest.keep_best.empty() && settings != manifest.texts.end()
                           ? keep_best_in(settings->second)
                           : manifest.keep_best;
    if (is_best() && !saved.empty() && saved != own) {
      throw SettingsError(concat("checkpoint.resume=best: checkpoint.keep_best=", own, ", but ",
                                 dir.path_of(folder), " was saved with ", saved,
                                 "; fix: set checkpoint.keep_best=", saved));
    }
  }

  // Step numbers decide the learning rate and the end of a run, so steps of other lengths change
  // both. Returns an empty text if the steps are alike, or nothing trains.
  std::string describe_other_steps(const CheckpointFolder& folder, const Manifest& manifest) const {
    const auto setting = manifest.texts.find("settings");
    const int64_t saved = manifest.samples_per_step > 0 || setting == manifest.texts.end()
                              ? manifest.samples_per_step
                              : samples_per_step(setting->second, manifest.world_size);
    const int64_t now = options.samples_per_step;
    const bool is_known = saved > 0 && now > 0;
    if (options.read_only ||
        (is_known ? saved == now : manifest.world_size == control_plane.world_size())) {
      return "";
    }
    const auto length = [&](int64_t samples, int64_t ranks) {
      return (is_known ? concat(samples, " samples per step on ") : std::string()) +
             concat(ranks, ranks == 1 ? " rank" : " ranks");
    };
    return concat(
        "the checkpoint ", dir.path_of(folder), " was saved by a run with ",
        length(saved, manifest.world_size), ", but this run has ",
        length(now, control_plane.world_size()),
        ": step numbers would stand for other amounts of data, so learning rates, epochs and the "
        "end of the run would change; fix: set train.batch_size, loader.global_batch_size or "
        "train.grad_accum_steps so that a step of all ranks has the same samples (a program with a "
        "batch of its own: CheckpointOptions::samples_per_step)");
  }

  // Returns the names of saved objects that this program does not have.
  std::vector<std::string> load(const CheckpointFolder& folder, const Manifest& manifest) {
    const auto path = dir.path_of(folder);
    std::map<std::string, Safetensors> files;
    for (const auto& file : manifest.files) {
      if (reads_file(file.name)) {
        files[file.name] = load_safetensors(path + "/" + file.name);
      }
    }
    std::vector<std::string> unused;
    try {
      unused = restore_snapshot(objects, manifest, files, control_plane.rank(), device);
    } catch (const MismatchError& error) {
      throw MismatchError(
          concat("the checkpoint ", path, " does not fit: ", error.what(),
                 "; fix: set another checkpoint.dir, or use the settings of the saved run"));
    }
    texts.load(manifest.texts, path);
    return unused;
  }

  void log_loaded(const CheckpointFolder& folder, const Manifest& manifest,
                  const std::vector<std::string>& unused, const std::string& other_steps) const {
    if (!is_main()) {
      return;
    }
    const auto path = dir.path_of(folder);
    if (options.read_only) {  // the warnings below concern training
      log_info(concat("loaded ", path, ", of ", manifest.step, " steps",
                      manifest.metric ? concat(", metric ", *manifest.metric) : ""));
      warn_of_unused_averages(path, unused);
      return;
    }
    log_info(concat("resumed from ", path, " after ", manifest.step, " steps"));
    for (const auto& name : unused) {
      log_warning(concat(path, " also has state of '", name, "', which this program does not use"));
    }
    if (!other_steps.empty()) {
      log_warning(other_steps + "; a loop that counts epochs or samples is right as it is");
    }
    if (manifest.world_size != control_plane.world_size()) {
      log_warning(concat("the checkpoint was saved by ", manifest.world_size,
                         " ranks and is resumed by ", control_plane.world_size(),
                         ": training continues with other random numbers (dropout, augmentation)"));
    }
  }

  // Programs evaluate the averages, if they have any: the metric may be theirs.
  void warn_of_unused_averages(const std::string& path,
                               const std::vector<std::string>& unused) const {
    if (std::find(unused.begin(), unused.end(), "ema") != unused.end()) {
      log_warning(concat(path, " also has averaged weights ('ema'), which this program does not ",
                         "use: it evaluates the weights that were trained",
                         is_best() ? ", and the metric may be that of the averages" : ""));
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
