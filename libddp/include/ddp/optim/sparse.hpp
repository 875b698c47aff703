// SPDX-License-Identifier: Apache-2.0
// An optimizer for sparse gradients: a step reads and writes only the rows that have a gradient.
//
//   ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);  // ddp.sparse=gather
//   auto rows = ddp::make_sparse_optimizer(model, {.rule = ddp::SparseRule::Adagrad});
//   auto dense = ddp::make_optimizer(ddp::dense_parameters(model), cfg.optimizer);
//   ...
//   loss.backward();
//   rows->step(lr);
//   dense->step(lr);
#pragma once

#include <memory>

#include "ddp/core/fields.hpp"
#include "ddp/optim/optimizer.hpp"

namespace ddp {

class DataParallelModel;

/// The formulas of torch.optim for sparse gradients.
enum class SparseRule {
  Sgd,         ///< SGD without momentum and weight decay
  Adagrad,     ///< state: `step` and `sum`
  SparseAdam,  ///< state: `step`, `exp_avg` and `exp_avg_sq`, which rows without gradient keep
};

/// Names and defaults are those of torch.optim.
struct SparseOptimizerOptions {
  SparseRule rule = SparseRule::Adagrad;   ///< the formula of the step
  double lr_decay = 0.0;                   ///< Adagrad: the rate is lr / (1 + steps * lr_decay)
  double initial_accumulator_value = 0.0;  ///< Adagrad: of `sum`
  double beta1 = 0.9;                      ///< SparseAdam
  double beta2 = 0.999;                    ///< SparseAdam
  NumberOrAuto eps = std::nullopt;         ///< auto: 1e-10 for Adagrad, 1e-8 for SparseAdam
};
void describe_fields(SparseOptimizerOptions& options, FieldVisitor& visitor);

/// The trained parameters whose gradients ddp.sparse=gather gathers, and the others.
NamedParameters sparse_parameters(const DataParallelModel& model);
NamedParameters dense_parameters(const DataParallelModel& model);  ///< see sparse_parameters()

/// Makes an optimizer over float32 or float64 `parameters`, whose gradients are sparse tensors with
/// one sparse dimension. A dense gradient is a SettingsError in step(). State has the size of the
/// parameters and is made when the first gradient arrives. Its state_name() is "sparse_optimizer".
/// Not capturable; a GradScaler reads found_inf on the host. Throws SettingsError for settings out
/// of range, other dtypes and an empty list.
std::unique_ptr<Optimizer> make_sparse_optimizer(const NamedParameters& parameters,
                                                 const SparseOptimizerOptions& options);
/// The same over sparse_parameters(model).
std::unique_ptr<Optimizer> make_sparse_optimizer(const DataParallelModel& model,
                                                 const SparseOptimizerOptions& options);

}  // namespace ddp
