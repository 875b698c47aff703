// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "comm/kernel_choices.hpp"
#include "core/rank_position.hpp"
#include "ddp/core/logging.hpp"
#include "train/checkpoint_exchange.hpp"

namespace ddp::detail {
namespace {

std::vector<std::string_view> chunks_of(const SerializedTensors& serialized) {
  std::vector<std::string_view> chunks{serialized.header};
  for (const auto& tensor : serialized.data) {
    chunks.emplace_back(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  return chunks;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Adds another fix to the disk errors that `write` throws.
template <typename F>
auto naming_fix(F&& write) {
  try {
    return write();
  } catch (const FileError& error) {
    throw WriteError(error.what() + std::string(kOtherFolder));
  }
}

}  // namespace

void CheckpointerImpl::save(int64_t step, std::optional<double> metric) {
  if (!enabled()) {
    return;
  }
  const ActivityScope activity(control_plane_, "save");
  note_call(step);
  const int64_t done = step + 1;
  if (pending_ && adds_nothing(pending_->step, pending_->has_metric, done, metric.has_value())) {
    return;
  }
  finish_pending();
  if (adds_nothing(last_saved_step_, last_saved_has_metric_, done, metric.has_value())) {
    return;
  }
  begin(done, metric);
  if (pending_ && !options_.async) {
    finish_pending();
  }
}

// The same state would be written again; only a metric used by keep_best makes a difference.
bool CheckpointerImpl::adds_nothing(int64_t saved_step, bool saved_has_metric, int64_t done,
                                    bool has_metric) const {
  return done == saved_step && (!has_metric || saved_has_metric || options_.keep_best == "off");
}

void CheckpointerImpl::wait() {
  const ActivityScope activity(control_plane_, "save");
  finish_pending();
  throw_if_unsaved();
}

void CheckpointerImpl::throw_if_unsaved() {
  if (const auto failure = std::exchange(unsaved_, std::nullopt)) {
    throw SaveFailure(*failure);
  }
}

// Only a later step shows that a run survived a failed save.
void CheckpointerImpl::note_call(int64_t step) {
  if (tell_going_on_ && step > last_call_) {
    tell_going_on_ = false;
    if (is_main()) {
      log_warning(concat(
          "training goes on; the next checkpoint is due as usual, the newest ",
          last_saved_step_ < 0 ? "is none yet" : concat("is of ", last_saved_step_, " steps")));
    }
  }
  last_call_ = step;
}

// Rank 0 makes the folder; all ranks receive its name, or the reason for a failure.
std::string CheckpointerImpl::agree_on_folder(int64_t done) {
  const auto [folder, why_none] = broadcast_from_main(control_plane_, [&] {
    std::pair<std::string, std::string> answer;
    try {
      if (owner_ == nullptr) {
        own_folder();
      }
      owner_->require_own();
      answer.first = naming_fix([&] { return begin_save(ops_, options_.dir, done); });
    } catch (const FolderTakenError&) {
      throw;  // no later save can succeed
    } catch (const Error& error) {
      answer.second = error.what();
    }
    return answer;
  });
  if (folder.empty()) {
    note_failure(done, 0, why_none);
  }
  return folder;
}

void CheckpointerImpl::begin(int64_t done, std::optional<double> metric) {
  last_save_time_ = Clock::now();  // also of a save that fails: the next one is due as usual
  not_finite_ = before_save_ ? before_save_() : "";
  const auto folder = agree_on_folder(done);
  if (folder.empty()) {
    return;
  }
  pending_ = Pending{.step = done,
                     .folder = folder,
                     .has_metric = metric.has_value(),
                     .metric = is_main() ? metric : std::nullopt};
  records_.clear();
  try {
    snapshot_ = take_snapshot(objects_, rank_, device_, buffers_);
  } catch (const PeerLostError&) {
    throw;  // the job ends
  } catch (const std::exception& error) {
    // Reported like a failed write: the other ranks receive it in the next exchange.
    writer_.start(
        [reason = concat("copying the state: ", error.what())] { throw WriteError(reason); });
    return;
  }
  writer_.start([this] { naming_fix([this] { write_files(); }); });
}

// On the writing thread.
void CheckpointerImpl::write_files() {
  snapshot_.wait();
  if (not_finite_.empty()) {
    const auto name = snapshot_.first_non_finite();
    not_finite_ = name.empty() ? "" : "inf or NaN in " + name;
  }
  const std::string folder = options_.dir + "/" + pending_->folder;
  for (const auto& [name, tensors] : snapshot_.files) {
    const auto serialized = [&, &path = name, &content = tensors] {
      try {
        return serialize_tensors(content, {{"format", "pt"}});
      } catch (const WriteError& error) {
        throw WriteError(concat("cannot write ", folder, "/", path, ": ", error.what()));
      }
    }();
    records_.push_back(write_new_file(ops_, folder, name, chunks_of(serialized)));
  }
}

void CheckpointerImpl::start_commit(const std::vector<Status>& statuses) {
  Manifest manifest{.step = pending_->step,
                    .world_size = static_cast<int64_t>(statuses.size()),
                    .metric = pending_->metric,
                    .finite = pending_->not_finite.empty()};
  for (const auto& status : statuses) {
    manifest.files.insert(manifest.files.end(), status.records.begin(), status.records.end());
  }
  manifest.values = snapshot_.values;
  manifest.leaf_dtypes = snapshot_.leaf_dtypes;
  if (const auto communicator = communicator_.lock(); communicator != nullptr && is_main()) {
    keep_kernel_choices(communicator->plan());
    if (!communicator->plan().empty()) {
      texts_["plan"] = communicator->plan().to_json();
    }
  }
  manifest.texts = texts_;
  writer_.start([this, manifest = std::move(manifest), saving = pending_->folder,
                 damaged = damaged_] {
    owner_->require_own();
    const auto made = naming_fix([&] { return commit_save(ops_, options_.dir, saving, manifest); });
    committed_ = made.name;
    prune_checkpoints(ops_, options_.dir, made,
                      {.keep_last = options_.keep_last,
                       .keep_best = options_.keep_best != "off",
                       .best_is_max = options_.keep_best == "max",
                       .damaged = damaged});
  });
}

void CheckpointerImpl::note_saved() {
  last_saved_step_ = pending_->step;
  last_saved_has_metric_ = pending_->has_metric;
  failures_in_a_row_ = 0;
  unsaved_.reset();
  tell_going_on_ = false;
  damaged_.erase(committed_);  // a reused name
  if (is_main()) {
    log_info(concat("saved ", options_.dir, "/", committed_, " in ",
                    seconds_since(pending_->started), " s",
                    options_.async ? " beside training" : ""));
    if (!pending_->not_finite.empty()) {
      log_warning(concat("that checkpoint counts as not finite (", pending_->not_finite,
                         "): it pushes no finite one out, and a start takes it only where there is "
                         "no finite one"));
    }
  }
  pending_.reset();
}

void CheckpointerImpl::note_failure(int64_t done, int rank, const std::string& reason) {
  pending_.reset();
  ++failures_in_a_row_;
  const auto message =
      concat("the checkpoint after ", done, " steps was not saved (failure ", failures_in_a_row_,
             " of at most ", options_.max_failures, " in a row, checkpoint.max_failures): rank ",
             rank, ": ", reason, "; earlier checkpoints are untouched");
  if (failures_in_a_row_ >= options_.max_failures) {
    unsaved_.reset();
    throw SaveFailure(rank, message);
  }
  if (is_main()) {
    log_error(message);
  }
  unsaved_.emplace(rank, message);
  tell_going_on_ = true;
}

}  // namespace ddp::detail
