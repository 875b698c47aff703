// SPDX-License-Identifier: Apache-2.0
// The outcomes of a run's saves: the newest saved step, and failures. Every rank has the same
// history; rank 0 logs. Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "core/control/failure/failure_cause.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/train/options.hpp"

namespace ddp::detail {

/// A failed save. Every rank throws it, and it names the rank that failed.
struct SaveFailure : WriteError {
  SaveFailure(int rank_in, const std::string& message) : WriteError(message), rank(rank_in) {}
  FailureCause cause() const {
    FailureCause cause;
    cause.rank = rank;
    cause.message = what();
    cause.exit_code = exit_code();
    return cause;
  }
  int rank;  ///< the rank that could not write
};

/// The state after a number of steps, with or without a metric for keep_best.
struct SavedStep {
  int64_t done = -1;  ///< steps done; -1: nothing is saved
  bool has_metric = false;
};

class SaveHistory {
 public:
  SaveHistory(const CheckpointOptions& options, bool is_main)
      : max_failures_(options.max_failures),
        uses_metric_(options.keep_best != KeepBest::Off),
        is_main_(is_main) {}

  /// The training loop called after step `step`. Only a later step shows that a run survived a
  /// failed save, which is then logged.
  void record_call(int64_t step) {
    if (survival_unknown_ && step > last_call_) {
      survival_unknown_ = false;
      if (is_main_) {
        log_warning(concat("training continues after the failed save; ",
                           newest_.done < 0
                               ? "there is no checkpoint yet"
                               : concat("the newest checkpoint has ", newest_.done, " steps")));
      }
    }
    last_call_ = step;
  }
  /// A checkpoint was committed: earlier failures no longer count.
  void record_saved(const SavedStep& saved) {
    newest_ = saved;
    failures_in_a_row_ = 0;
    failure_.reset();
    survival_unknown_ = false;
  }
  /// The run continues from a checkpoint.
  void record_restored(const SavedStep& saved) { newest_ = saved; }
  /// Logs the failure, or throws SaveFailure if it is the max_failures-th in a row.
  void record_failure(int64_t done, int rank, const std::string& reason) {
    ++failures_in_a_row_;
    const auto message =
        concat("the checkpoint after ", done, " steps was not saved (failure ", failures_in_a_row_,
               " of at most ", max_failures_, " in a row, checkpoint.max_failures): rank ", rank,
               ": ", reason, "; earlier checkpoints are untouched");
    if (failures_in_a_row_ >= max_failures_) {
      failure_.reset();
      throw SaveFailure(rank, message);
    }
    if (is_main_) {
      log_error(message);
    }
    failure_.emplace(rank, message);
    survival_unknown_ = true;
  }

  const SavedStep& newest() const { return newest_; }
  /// Whether saving `next` after `saved` would write the same state again. Only a metric used by
  /// keep_best makes a difference.
  bool would_repeat(const SavedStep& saved, const SavedStep& next) const {
    return next.done == saved.done && (!next.has_metric || saved.has_metric || !uses_metric_);
  }

  /// The failure of the newest save, unless it was thrown.
  const std::optional<SaveFailure>& failure() const { return failure_; }
  std::optional<SaveFailure> take_failure() { return std::exchange(failure_, std::nullopt); }

 private:
  const int64_t max_failures_;
  const bool uses_metric_;
  const bool is_main_;
  SavedStep newest_;
  int64_t failures_in_a_row_ = 0;
  std::optional<SaveFailure> failure_;
  bool survival_unknown_ = false;  ///< a failure was logged; no later step was seen
  int64_t last_call_ = -1;         ///< step of the newest call
};

}  // namespace ddp::detail
