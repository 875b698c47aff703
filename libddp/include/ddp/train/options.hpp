// SPDX-License-Identifier: Apache-2.0
// Settings of training: loop, captured steps, checkpoints, metrics.
#pragma once

#include <cstdint>
#include <string>

#include "ddp/core/fields.hpp"
#include "ddp/detail/loop_length.hpp"
#include "ddp/detail/usage_mark.hpp"

namespace ddp {

/// Whether a step runs as one CUDA graph.
enum class CudaGraph {
  Auto,  ///< on a GPU if the step can be captured; else logs the reason once
  On,    ///< a step that cannot be captured is an error
  Off
};

/// Settings of a GraphedStep.
struct GraphedStepOptions {
  CudaGraph mode = CudaGraph::Auto;  ///< train.cuda_graph
  /// Eager steps before the first capture, at least 1. A capture also waits until the buckets were
  /// rebuilt. Each later capture needs one eager step of the same batch shape.
  int64_t warmup_steps = 3;
  int64_t max_graphs = 8;  ///< graphs cached at a time; further combinations run eagerly
  /// train.replay_check_every: calls between checks that this device computes a step twice alike.
  int64_t replay_check_every = 0;
  std::string name = "the training step";  ///< in messages
};

/// How a training loop handles inf and NaN in its loss or gradients: see NonFiniteGuard.
enum class NonFinite { Error, Skip, Ignore };

struct TrainOptions {
  /// Most optimizer steps of the run; 0: no limit. Reads as int64_t. ddp::run refuses
  /// train.max_steps=N if the program reads neither this nor num_steps(). `epochs` likewise.
  detail::LoopLength max_steps = 1000;
  detail::LoopLength epochs = 0;  ///< most epochs of the run; 0: no limit
  int64_t batch_size = 32;  ///< samples per rank and micro-batch; ddp::Config copies it to `loader`
  int64_t grad_accum_steps = 1;             ///< micro-batches per optimizer step
  double max_grad_norm = 0.0;               ///< gradients are scaled down to this norm; 0: never
  NonFinite non_finite = NonFinite::Error;  ///< in the loss or the unscaled gradients
  double label_smoothing = 0.0;             ///< share of the target spread over all classes
  double mixup = 0.0;            ///< alpha of the Beta distribution that mixes pairs; 0: off
  double cutmix = 0.0;           ///< same, of the box that a sample takes from its pair; 0: off
  int64_t eval_every = 1;        ///< epochs between evaluations; 0: never
  int64_t eval_every_steps = 0;  ///< > 0: evaluate every N steps and at the end, not by epochs
  bool eval_first = false;       ///< also evaluate before the first step
  int64_t eval_batch_size = 0;   ///< samples per rank; 0: batch_size
  CudaGraph cuda_graph = CudaGraph::Auto;  ///< run training and evaluation steps as CUDA graphs
  int64_t replay_check_every = 0;          ///< steps between two runs of one step; 0: never
  bool deterministic = false;              ///< use only kernels with bitwise reproducible results
  bool cudnn_benchmark = true;             ///< cuDNN tries its algorithms once per shape
  bool allow_tf32 = false;                 ///< float32 matrix products in TF32 on CUDA

  /// Optimizer steps of the whole run: `epochs` times `steps_per_epoch`, at most `max_steps`; 0
  /// disables either. Throws SettingsError if both are 0, or if `epochs` is set and an epoch has no
  /// step. With `epochs` = 0 `steps_per_epoch` may be 0: DataLoader::next() refuses data without a
  /// batch.
  int64_t num_steps(int64_t steps_per_epoch) const;
};
void describe_fields(TrainOptions& options, FieldVisitor& visitor);

enum class Resume {
  Auto,     ///< from the newest valid checkpoint, if any
  Never,    ///< start at step 0; an error if `dir` holds checkpoints
  Require,  ///< an error without a checkpoint
  Best      ///< the best by keep_best, read_only; an error without one
};
enum class KeepBest { Off, Min, Max };

struct CheckpointOptions {
  std::string dir = "";  ///< folder that all ranks see; empty: nothing is saved or restored
  Resume resume = Resume::Auto;
  int64_t every_steps = 0;      ///< 0: not by steps
  double every_minutes = 10.0;  ///< 0: not by time
  int64_t keep_last = 3;
  KeepBest keep_best = KeepBest::Off;  ///< of the metric passed to Checkpointer::save
  bool async = true;                   ///< write from a background thread
  int64_t max_failures = 3;         ///< failed saves in a row until training ends with exit code 73
  double stop_check_seconds = 1.0;  ///< interval of the ranks' stop checks

  bool read_only = false;        ///< not a setting: nothing is saved or changed in `dir`
  bool same_steps = false;       ///< not a setting: refuses other samples per step; false: warns
  int64_t samples_per_step = 0;  ///< not a setting: of all ranks, saved and compared; 0: unknown
  // Not settings: texts saved with every checkpoint, set by ddp::Config or by the program.
  std::string settings_text{};          ///< the resolved settings
  std::string plan_text{};              ///< the measured choices; loaded again on resume
  std::string default_settings_text{};  ///< not saved: a resume ignores differences to these
  detail::UsageMark usage{};  ///< not a setting: set when a library object receives these options
};
void describe_fields(CheckpointOptions& options, FieldVisitor& visitor);

/// Constants of a run that a program states, written to run.json and to every epoch row. A constant
/// that the program leaves unset has its setting's value if the program used that section, else it
/// stays empty.
struct RunInfo {
  std::string precision{};              ///< "fp32", "bf16", "fp16"
  int64_t batch_size_per_rank = 0;      ///< samples per optimizer step and rank
  int64_t global_batch_size = 0;        ///< of all ranks; 0: batch_size_per_rank times the ranks
  double bucket_cap_mb = 0;             ///< MiB
  std::string sample_unit = "samples";  ///< unit of num_samples; rates: samples_per_second
  std::string settings_text{};          ///< the resolved settings, saved in the run folder
  double peak_tflops = 0;               ///< of a rank's device, for MFU; 0: by the GPU's name
  std::string program_version{};        ///< for run.json; libddp finds the program's commit itself
};

namespace detail {
/// Constants from the settings. A value is valid if its mark is set: a library object received the
/// section.
struct ConfiguredRun {
  std::string precision{};  ///< of `amp`
  UsageMark amp{};
  int64_t batch_size = 0;         ///< of a rank, by the settings, without accumulation
  int64_t global_batch_size = 0;  ///< of all ranks, by the settings; 0: batch_size of each
  int64_t grad_accum_steps = 1;
  UsageMark loader{};        ///< its values: the batch sizes of all ranks that loaders had
  double bucket_cap_mb = 0;  ///< of `ddp`
  UsageMark ddp{};
};
}  // namespace detail

/// Auto: a bar on a terminal, plain lines elsewhere.
enum class ProgressStyle { Auto, Bar, Plain, Off };

struct MetricsOptions {
  int64_t log_every = 10;     ///< steps between log lines; 0: none
  std::string dir = "runs";   ///< parent of run folders; empty: no files
  std::string run_name = "";  ///< empty: the job id, or the time
  ProgressStyle progress = ProgressStyle::Auto;
  int64_t repeat = 1;  ///< number of this run among a study's repeats
  bool csv = true;
  bool jsonl = true;
  bool tensorboard = false;      ///< event files
  int64_t trace_first_step = 0;  ///< first step in the trace
  int64_t trace_steps = 0;       ///< number of traced steps; 0: no trace
  bool nvtx = false;             ///< NVTX ranges, for Nsight

  RunInfo run;  ///< not settings: set by the program; settings_text by ddp::Config
  detail::ConfiguredRun configured{};  ///< not settings: set by ddp::Config
  detail::UsageMark usage{};  ///< not a setting: set when a library object receives these options
};
void describe_fields(MetricsOptions& options, FieldVisitor& visitor);

}  // namespace ddp
