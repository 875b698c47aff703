// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint_saver.hpp"

#include <algorithm>
#include <utility>

#include "ddp/core/logging.hpp"

namespace ddp::detail {

CheckpointSaver::CheckpointSaver(ControlPlane& control_plane, at::Device device,
                                 const CheckpointOptions& options, const Parts& parts)
    : control_plane_(control_plane),
      async_(options.async),
      dir_(parts.dir),
      texts_(parts.texts),
      history_(parts.history),
      writer_(parts.dir, parts.objects, control_plane.rank(), device) {}

// Rank 0 makes the folder; all ranks receive its name, or the reason for a failure.
std::string CheckpointSaver::agree_on_folder(int64_t done) {
  const auto [folder, why_none] = broadcast_from_main(control_plane_, [&] {
    std::pair<std::string, std::string> answer;
    try {
      answer.first = dir_.begin_save(done);
    } catch (const FolderTakenError&) {
      throw;  // no later save can succeed
    } catch (const Error& error) {
      answer.second = error.what();
    }
    return answer;
  });
  if (folder.empty()) {
    history_.note_failure(done, 0, why_none);
  }
  return folder;
}

void CheckpointSaver::begin(int64_t done, std::optional<double> metric,
                            const std::string& why_not_finite) {
  const auto folder = agree_on_folder(done);
  if (folder.empty()) {
    return;
  }
  pending_ = Pending{.step = done,
                     .folder = folder,
                     .has_metric = metric.has_value(),
                     .metric = is_main() ? metric : std::nullopt};
  writer_.write(folder, why_not_finite);
}

std::optional<SavedStep> CheckpointSaver::in_progress() const {
  return pending_ ? std::optional(SavedStep{pending_->step, pending_->has_metric}) : std::nullopt;
}

WriterStatus CheckpointSaver::status() const {
  return writer_.status(/*with_files=*/pending_ && pending_->phase == Phase::Writing);
}

void CheckpointSaver::advance(const std::vector<RankStatus>& statuses) {
  if (!pending_) {
    return;
  }
  if (pending_->phase == Phase::Writing) {
    finish_writing(statuses);
    return;
  }
  const auto& main = statuses[0].writer;
  if (main.state == WriterStatus::State::Failed) {
    drop(0, main.error);
  } else if (main.state != WriterStatus::State::Running) {
    finish_commit();
  }
}

void CheckpointSaver::finish_writing(const std::vector<RankStatus>& statuses) {
  // The folder must stay until the last rank has finished writing: a failure elsewhere waits too.
  if (std::any_of(statuses.begin(), statuses.end(), [](const RankStatus& status) {
        return status.writer.state == WriterStatus::State::Running;
      })) {
    return;
  }
  for (std::size_t rank = 0; rank < statuses.size(); ++rank) {
    const auto& writer = statuses[rank].writer;
    if (writer.state == WriterStatus::State::Failed) {
      if (is_main()) {
        dir_.discard_save(pending_->folder);
      }
      drop(static_cast<int>(rank), writer.error);
      return;
    }
    auto& not_finite = pending_->not_finite;
    not_finite = not_finite.empty() ? writer.not_finite : not_finite;
  }
  pending_->phase = Phase::Committing;
  if (is_main()) {
    start_commit(statuses);
  }
}

void CheckpointSaver::start_commit(const std::vector<RankStatus>& statuses) {
  Manifest manifest{.step = pending_->step,
                    .world_size = static_cast<int64_t>(statuses.size()),
                    .metric = pending_->metric,
                    .finite = pending_->not_finite.empty()};
  for (const auto& status : statuses) {
    const auto& records = status.writer.records;
    manifest.files.insert(manifest.files.end(), records.begin(), records.end());
  }
  manifest.texts = texts_.collect();
  writer_.commit(pending_->folder, std::move(manifest));
}

void CheckpointSaver::finish_commit() {
  const auto saved = *std::exchange(pending_, std::nullopt);
  history_.note_saved({saved.step, saved.has_metric});
  dir_.note_committed(writer_.committed());
  if (!is_main()) {
    return;
  }
  const std::chrono::duration<double> seconds = Clock::now() - saved.started;
  log_info(concat("saved ", dir_.path_of(writer_.committed()), " in ", seconds.count(), " s",
                  async_ ? " beside training" : ""));
  if (!saved.not_finite.empty()) {
    log_warning(concat("that checkpoint counts as not finite (", saved.not_finite,
                       "): it pushes no finite one out, and a start takes it only where there is "
                       "no finite one"));
  }
}

void CheckpointSaver::drop(int rank, const std::string& reason) {
  const auto step = pending_->step;
  pending_.reset();
  history_.note_failure(step, rank, reason);
}

}  // namespace ddp::detail
