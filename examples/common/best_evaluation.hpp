// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>

#include "ddp/train/checkpoint.hpp"

namespace examples {

/// The evaluation with the smallest loss so far, kept with every checkpoint, so that a resumed run
/// knows it too.
class BestEvaluation {
 public:
  explicit BestEvaluation(ddp::Checkpointer& checkpointer) : checkpointer_(checkpointer) {}

  /// Call after Checkpointer::restore.
  void restore();
  /// True where `loss` is below all before; NaN never is.
  bool note(int64_t steps_done, double loss);

  int64_t steps_done() const { return steps_done_; }  ///< -1: none yet
  double loss() const { return loss_; }

 private:
  ddp::Checkpointer& checkpointer_;
  int64_t steps_done_ = -1;
  double loss_ = std::numeric_limits<double>::infinity();
};

}  // namespace examples
