// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint/checkpoint_saver.hpp"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "core/files/serialize_tensors.hpp"
#include "core/log/error_text.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

// Longer error messages are cut, so that those of all ranks fit into one control-plane message.
constexpr std::size_t kMaxErrorBytes = 4096;

std::vector<std::string_view> chunks_of(const SerializedTensors& serialized) {
  std::vector<std::string_view> chunks{serialized.header};
  for (const auto& tensor : serialized.data) {
    chunks.emplace_back(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  return chunks;
}

}  // namespace

CheckpointWriter::CheckpointWriter(CheckpointDir& dir, const std::vector<StatefulRef>& objects,
                                   int rank, at::Device device)
    : dir_(dir), objects_(objects), rank_(rank), device_(device) {}

void CheckpointWriter::write(const std::string& saving, const std::string& why_not_finite) {
  not_finite_ = why_not_finite;
  records_.clear();
  try {
    snapshot_ = take_snapshot(objects_, rank_, device_, buffers_);
  } catch (const PeerLostError&) {
    throw;  // the job ends
  } catch (const std::exception& error) {
    // Reported like a failed write: the other ranks receive it in the next exchange.
    task_.start([reason = concat("the state cannot be copied: ", message_of(error))] {
      throw WriteError(reason);
    });
    return;
  }
  task_.start([this, saving] { write_files(saving); });
}

void CheckpointWriter::write_files(const std::string& saving) {
  snapshot_.wait();
  if (not_finite_.empty()) {
    const auto name = snapshot_.first_non_finite();
    not_finite_ = name.empty() ? "" : "inf or NaN in " + name;
  }
  for (const auto& [name, file] : snapshot_.files) {
    const auto serialized = [&, &path = name, &content = file] {
      std::map<std::string, std::string> metadata{{"format", "pt"}};
      if (!content.entries.empty()) {
        metadata[kEntriesName] = entries_to_json(content.entries);
      }
      try {
        return serialize_tensors(content.tensors, metadata);
      } catch (const WriteError& error) {
        throw WriteError(
            concat("cannot write ", dir_.path_of(saving), "/", path, ": ", error.what()));
      }
    }();
    records_.push_back(dir_.write_file(saving, name, chunks_of(serialized)));
    records_.back().has_parts = !file.entries.empty();
  }
}

void CheckpointWriter::commit(const std::string& saving, Manifest manifest) {
  manifest.values = snapshot_.values;
  task_.start([this, saving, manifest = std::move(manifest), retention = dir_.retention()] {
    committed_ = dir_.commit(saving, manifest, retention);
  });
}

WriterStatus CheckpointWriter::status(bool with_files) const {
  if (task_.running()) {
    return {.state = WriterStatus::State::Running};
  }
  WriterStatus status{.error = task_.error().substr(0, kMaxErrorBytes)};
  if (!status.error.empty()) {
    status.state = WriterStatus::State::Failed;
  } else if (with_files) {
    status.records = records_;
    status.not_finite = not_finite_;
  }
  return status;
}

CheckpointSaver::CheckpointSaver(ControlPlane& control_plane, at::Device device,
                                 const CheckpointOptions& options, const Parts& parts)
    : control_plane_(control_plane),
      async_(options.async),
      keep_best_(to_text(options.keep_best)),
      samples_per_step_(options.samples_per_step),
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
    history_.record_failure(done, 0, why_none);
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

std::string CheckpointSaver::advance(const std::vector<RankStatus>& statuses) {
  if (!pending_) {
    return "";
  }
  if (pending_->phase == Phase::Writing) {
    finish_writing(statuses);
    return "";
  }
  const auto& main = statuses[0].writer;
  if (main.state == WriterStatus::State::Failed) {
    drop(0, main.error);
  } else if (main.state != WriterStatus::State::Running) {
    return finish_commit();
  }
  return "";
}

void CheckpointSaver::finish_writing(const std::vector<RankStatus>& statuses) {
  // The folder must stay until the last rank has finished writing, also after a failure.
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
                    .keep_best = keep_best_,
                    .samples_per_step = samples_per_step_,
                    .finite = pending_->not_finite.empty()};
  for (const auto& status : statuses) {
    const auto& records = status.writer.records;
    manifest.files.insert(manifest.files.end(), records.begin(), records.end());
  }
  manifest.texts = texts_.collect();
  writer_.commit(pending_->folder, std::move(manifest));
}

std::string CheckpointSaver::finish_commit() {
  const auto saved = *std::exchange(pending_, std::nullopt);
  history_.record_saved({saved.step, saved.has_metric});
  dir_.record_committed(writer_.committed());
  if (!is_main()) {
    return "";
  }
  const std::chrono::duration<double> seconds = Clock::now() - saved.started;
  log_info(concat("saved ", dir_.path_of(writer_.committed()), " in ",
                  std::round(seconds.count() * 100) / 100, " s",
                  async_ ? " (in the background)" : ""));
  if (!saved.not_finite.empty()) {
    log_warning(concat("this checkpoint counts as not finite (", saved.not_finite,
                       "): it does not replace a finite checkpoint, and restore() loads it only if "
                       "there is no finite one"));
  }
  return writer_.committed();
}

void CheckpointSaver::drop(int rank, const std::string& reason) {
  const auto step = pending_->step;
  pending_.reset();
  history_.record_failure(step, rank, reason);
}

}  // namespace ddp::detail
