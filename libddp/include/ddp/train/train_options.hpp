// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ddp/core/fields.hpp"
#include "ddp/train/graphed_step_options.hpp"

namespace ddp {

/// What a training loop does about inf and NaN in its loss or gradients: see NonFiniteGuard.
enum class NonFinite { Error, Skip, Ignore };

/// What a training loop needs to know beyond the parts that have options of their own.
struct TrainOptions {
  int64_t max_steps = 1000;  ///< optimizer steps until the run ends; 0: `epochs` decides
  int64_t epochs = 0;        ///< the run ends after so many; 0: `max_steps` decides
  int64_t batch_size = 32;   ///< samples a rank and micro-batch; ddp::Config hands it to `loader`
  int64_t grad_accum_steps = 1;             ///< micro-batches an optimizer step
  double max_grad_norm = 0.0;               ///< gradients are scaled down to this norm; 0: not
  NonFinite non_finite = NonFinite::Error;  ///< in the loss or the unscaled gradients
  double label_smoothing = 0.0;             ///< share of the target given to all classes
  double mixup = 0.0;            ///< alpha of the Beta distribution that mixes pairs; 0: off
  int64_t eval_every = 1;        ///< epochs between evaluations; 0: never
  int64_t eval_every_steps = 0;  ///< > 0: evaluate every so many optimizer steps and at the end,
                                 ///< and not by epochs
  bool eval_first = false;       ///< evaluate before the first step, too
  int64_t eval_batch_size = 0;   ///< samples a rank; 0: batch_size
  CudaGraph cuda_graph = CudaGraph::Auto;  ///< run training and evaluation steps as CUDA graphs
  bool deterministic = false;              ///< only kernels that give the same bits every time
  bool cudnn_benchmark = true;             ///< cuDNN tries its algorithms once a shape
  bool allow_tf32 = false;                 ///< float32 matrix products in TF32 on CUDA

  /// Optimizer steps of the whole run: `epochs` times `steps_per_epoch`, cut at `max_steps`; 0
  /// leaves either out. Throws SettingsError where both are 0.
  int64_t num_steps(int64_t steps_per_epoch) const;
};
void describe_fields(TrainOptions& options, FieldVisitor& visitor);

}  // namespace ddp
