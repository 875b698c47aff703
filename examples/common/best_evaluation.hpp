// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>

#include "ddp/train/checkpoint.hpp"

namespace examples {

/// The evaluation with the smallest loss so far. Every checkpoint holds it, so a resumed run knows
/// it too.
class BestEvaluation {
 public:
  explicit BestEvaluation(ddp::Checkpointer& checkpointer) : checkpointer_(checkpointer) {}

  /// Call after Checkpointer::restore.
  void restore();
  /// True if `loss` is below all earlier ones; never for NaN.
  bool note(int64_t steps_done, double loss);

  int64_t steps_done() const { return steps_done_; }  ///< -1: none yet
  double loss() const { return loss_; }

 private:
  ddp::Checkpointer& checkpointer_;
  int64_t steps_done_ = -1;
  double loss_ = std::numeric_limits<double>::infinity();
};

}  // namespace examples
