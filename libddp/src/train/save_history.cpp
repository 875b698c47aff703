// SPDX-License-Identifier: Apache-2.0
#include "train/save_history.hpp"

#include <utility>

#include "ddp/core/logging.hpp"

namespace ddp::detail {

SaveHistory::SaveHistory(const CheckpointOptions& options, bool is_main)
    : max_failures_(options.max_failures),
      uses_metric_(options.keep_best != "off"),
      is_main_(is_main) {}

void SaveHistory::note_call(int64_t step) {
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

void SaveHistory::note_saved(const SavedStep& saved) {
  newest_ = saved;
  failures_in_a_row_ = 0;
  failure_.reset();
  survival_unknown_ = false;
}

void SaveHistory::note_failure(int64_t done, int rank, const std::string& reason) {
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

bool SaveHistory::would_repeat(const SavedStep& saved, const SavedStep& next) const {
  return next.done == saved.done && (!next.has_metric || saved.has_metric || !uses_metric_);
}

std::optional<SaveFailure> SaveHistory::take_failure() {
  return std::exchange(failure_, std::nullopt);
}

}  // namespace ddp::detail
