// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/GradMode.h>

#include <memory>

#include "ddp/amp/amp.hpp"
#include "ddp/optim/ema.hpp"
#include "ddp/reduce/data_parallel_model.hpp"
#include "models/eval_scope.hpp"

namespace examples {

/// While it lives, a wrapped model computes as evaluations do: in evaluation mode, without
/// gradients, by the averages of weights and buffers if there are any. All ranks have rank 0's
/// buffers. One Autocast scope casts each weight once. The constructor is collective.
class EvaluationScope {
 public:
  /// `model` wraps `module`. `ema` may be nullptr.
  EvaluationScope(ddp::DataParallelModel& model, torch::nn::Module& module, ddp::Ema* ema,
                  const ddp::AmpOptions& amp)
      : swap_(ema != nullptr ? ema->swap_in() : nullptr), eval_(module), autocast_(amp) {
    model.sync_buffers();  // running statistics, or their averages
  }

 private:
  c10::NoGradGuard no_grad_;
  std::shared_ptr<ddp::Ema::Swap> swap_;
  models::EvalScope eval_;
  ddp::Autocast autocast_;
};

}  // namespace examples
