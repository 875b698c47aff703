// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ddp/core/fields.hpp"
#include "ddp/train/graphed_step_options.hpp"

namespace ddp {

/// How a training loop handles inf and NaN in its loss or gradients: see NonFiniteGuard.
enum class NonFinite { Error, Skip, Ignore };

/// Settings of a training loop, except those of parts with their own options.
struct TrainOptions {
  int64_t max_steps = 1000;  ///< optimizer steps until the run ends; 0: use `epochs`
  int64_t epochs = 0;        ///< epochs until the run ends; 0: use `max_steps`
  int64_t batch_size = 32;  ///< samples per rank and micro-batch; ddp::Config copies it to `loader`
  int64_t grad_accum_steps = 1;             ///< micro-batches per optimizer step
  double max_grad_norm = 0.0;               ///< gradients are scaled down to this norm; 0: never
  NonFinite non_finite = NonFinite::Error;  ///< in the loss or the unscaled gradients
  double label_smoothing = 0.0;             ///< share of the target spread over all classes
  double mixup = 0.0;            ///< alpha of the Beta distribution that mixes pairs; 0: off
  int64_t eval_every = 1;        ///< epochs between evaluations; 0: never
  int64_t eval_every_steps = 0;  ///< > 0: evaluate every N steps and at the end, not by epochs
  bool eval_first = false;       ///< also evaluate before the first step
  int64_t eval_batch_size = 0;   ///< samples per rank; 0: batch_size
  CudaGraph cuda_graph = CudaGraph::Auto;  ///< run training and evaluation steps as CUDA graphs
  bool deterministic = false;              ///< use only kernels with bitwise reproducible results
  bool cudnn_benchmark = true;             ///< cuDNN tries its algorithms once per shape
  bool allow_tf32 = false;                 ///< float32 matrix products in TF32 on CUDA

  /// Optimizer steps of the whole run: `epochs` times `steps_per_epoch`, at most `max_steps`; 0
  /// disables either. Throws SettingsError if both are 0.
  int64_t num_steps(int64_t steps_per_epoch) const;
};
void describe_fields(TrainOptions& options, FieldVisitor& visitor);

}  // namespace ddp
