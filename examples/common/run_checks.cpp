// SPDX-License-Identifier: Apache-2.0
#include "common/run_checks.hpp"

#include <algorithm>

#include "ddp/core/error.hpp"

namespace examples {

using ddp::concat;

void require_equal_batches(int64_t batches_per_epoch, ddp::ControlPlane& control_plane) {
  const auto counts = control_plane.all_gather_numbers({batches_per_epoch});
  const auto other = std::find_if(counts.begin(), counts.end(),
                                  [&](const auto& count) { return count != counts[0]; });
  if (other != counts.end()) {
    throw ddp::SettingsError(concat("sampler.pad=false gives rank 0 ", counts[0].at(0),
                                    " training batches an epoch and rank ", other - counts.begin(),
                                    " ", other->at(0),
                                    ": every rank needs as many; fix: sampler.pad=true, or "
                                    "sampler.drop_last=true"));
  }
}

void require_same_classes(const ddp::Dataset& train, const ddp::Dataset& test) {
  const auto of_train = train.class_names(), of_test = test.class_names();
  if (of_train.empty() || of_test.empty() || of_train == of_test) {
    return;
  }
  std::size_t i = 0;
  while (i < of_train.size() && i < of_test.size() && of_train[i] == of_test[i]) {
    ++i;
  }
  const auto name = [i](const std::vector<std::string>& names) {
    return i < names.size() ? "'" + names[i] + "'" : std::string("missing");
  };
  throw ddp::DataError(
      concat("the splits number their classes differently: class ", i, " is ", name(of_train),
             " in the training data and ", name(of_test),
             " in the test data; fix: data.path must hold the same classes in both "
             "(tar shards: the same classes.txt)"));
}

std::string EpochLength::to_string() const {
  return concat(steps, " steps an epoch of ", samples_per_step, " samples");
}

void require_same_epochs(ddp::Checkpointer& checkpointer, const EpochLength& length) {
  constexpr const char* kText = "epoch_length";
  const auto saved = checkpointer.text(kText);
  const auto now = length.to_string();
  if (!saved.empty() && saved != now) {
    throw ddp::SettingsError(concat(
        "the checkpoint was saved by a run with ", saved, ", this one has ", now,
        ": its learning rates and its end would move; fix: set train.batch_size or "
        "loader.global_batch_size so that all ranks together have the same batch (on the same "
        "data), or start anew in another checkpoint.dir"));
  }
  checkpointer.set_text(kText, now);
}

}  // namespace examples
