// SPDX-License-Identifier: Apache-2.0
// Ends a training whose evaluations no longer improve, as Lightning's EarlyStopping does.
//
//   ddp::EarlyStopping early_stopping(ctx, {.patience = 5});
//   ddp::Checkpointer checkpointer(ctx, cfg.checkpoint, {model, optimizer, early_stopping});
//   while (step < num_steps && !early_stopping.has_stopped()) {
//     … an epoch and its evaluation …
//     if (early_stopping.should_stop(test_loss)) { … }
//   }
#pragma once

#include <cstdint>
#include <string>

#include "ddp/comm/context.hpp"
#include "ddp/core/state_dict.hpp"

namespace ddp {

struct EarlyStoppingOptions {
  int64_t patience = 3;      ///< evaluations in a row without an improvement that end the training
  double min_delta = 0;      ///< an improvement is larger than this
  bool maximize = false;     ///< larger metrics are better, as of an accuracy
  bool check_finite = true;  ///< inf and NaN end the training at once
};

/// Its state is saved with a checkpoint, so a resumed run continues to count.
class EarlyStopping : public Stateful {
 public:
  /// `context` must outlive this object. Throws SettingsError for a patience below 1 and a negative
  /// min_delta.
  explicit EarlyStopping(const Context& context, const EarlyStoppingOptions& options = {});

  /// Call after each evaluation. Returns whether training has to end, on all ranks the same: rank
  /// 0's `metric` decides. Rank 0 logs the reason. Collective.
  bool should_stop(double metric);

  bool has_stopped() const { return has_stopped_; }  ///< should_stop() returned true
  double best() const { return best_; }              ///< ±infinity before the first metric
  int64_t num_waits() const { return num_waits_; }   ///< evaluations since the best one

  std::string state_name() const override { return "early_stopping"; }
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 private:
  bool is_better(double metric) const;

  const Context& context_;
  const EarlyStoppingOptions options_;
  double best_;
  int64_t num_waits_ = 0;
  bool has_stopped_ = false;
};

}  // namespace ddp
