// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/options.hpp"

#include <algorithm>

#include "ddp/core/error.hpp"

namespace ddp {

int64_t TrainOptions::num_steps(int64_t steps_per_epoch) const {
  if (epochs <= 0 && max_steps <= 0) {
    throw SettingsError(
        "train.epochs=0 and train.max_steps=0: the run would have no end; fix: set one of them");
  }
  if (epochs <= 0) {
    return max_steps;
  }
  if (steps_per_epoch <= 0) {
    throw SettingsError(concat(
        "an epoch has ", steps_per_epoch, " optimizer steps, so nothing would be trained: a rank ",
        "has fewer samples than one step takes (train.batch_size=", batch_size,
        ", train.grad_accum_steps=", grad_accum_steps,
        "); fix: set a smaller train.batch_size, train.grad_accum_steps or "
        "loader.global_batch_size, or loader.drop_last=false, or use more data"));
  }
  const int64_t by_epochs = epochs * steps_per_epoch;
  return max_steps <= 0 ? by_epochs : std::min<int64_t>(by_epochs, max_steps);
}

static void describe_targets(TrainOptions& o, FieldVisitor& v) {
  v.field({.name = "label_smoothing",
           .doc = "Share of the target that is spread evenly over all classes.",
           .min = 0,
           .max = 1,
           .in_loop = true},
          o.label_smoothing);
  v.field({.name = "mixup",
           .doc = "Alpha of the Beta distribution that mixes pairs of samples. 0: off.",
           .min = 0,
           .max = 4,
           .in_loop = true},
          o.mixup);
  v.field({.name = "cutmix",
           .doc = "CutMix: alpha of the Beta distribution that gives the area of the box that an "
                  "image takes from another. With mixup too, each batch uses one of them with "
                  "probability 0.5. 0: off.",
           .min = 0,
           .max = 4,
           .in_loop = true},
          o.cutmix);
}

static void describe_evaluation(TrainOptions& o, FieldVisitor& v) {
  v.field({.name = "eval_every",
           .doc = "Epochs between evaluations. 0: never.",
           .unit = "epochs",
           .min = 0,
           .in_loop = true},
          o.eval_every);
  v.field({.name = "eval_every_steps",
           .doc = "Optimizer steps between evaluations, with one at the end. 0: evaluate by "
                  "train.eval_every.",
           .unit = "steps",
           .min = 0,
           .in_loop = true},
          o.eval_every_steps);
  v.field({.name = "eval_first", .doc = "Also evaluate before the first step.", .in_loop = true},
          o.eval_first);
  v.field({.name = "eval_batch_size",
           .doc = "Samples per rank and evaluation batch. 0: train.batch_size.",
           .unit = "samples",
           .min = 0,
           .max = 1e7,
           .in_loop = true},
          o.eval_batch_size);
}

static void describe_kernels(TrainOptions& o, FieldVisitor& v) {
  v.field({.name = "cuda_graph",
           .doc = "Run training and evaluation steps as CUDA graphs. auto: steps that "
                  "can be captured. on: a step that cannot be captured ends the run.",
           .in_loop = true},
          o.cuda_graph,
          {{"auto", CudaGraph::Auto}, {"on", CudaGraph::On}, {"off", CudaGraph::Off}});
  v.field({.name = "replay_check_every",
           .doc = "Steps between checks of each device: forward and backward of the step run twice "
                  "and must give the same gradients. 0: never.",
           .unit = "steps",
           .min = 0,
           .in_loop = true},
          o.replay_check_every);
  v.field({.name = "deterministic", .doc = "Use only kernels that give the same bits every time."},
          o.deterministic);
  v.field({.name = "cudnn_benchmark",
           .doc = "Measure the fastest of cuDNN's algorithms when a shape first occurs. "
                  "Each rank measures by itself, unless context.plan_file or a "
                  "checkpoint has the result, so two runs may differ in their last bits. "
                  "Ignored with train.deterministic."},
          o.cudnn_benchmark);
  v.field({.name = "allow_tf32",
           .doc = "Compute float32 matrix products in TF32 on CUDA. Convolutions may use TF32 "
                  "either way, as in PyTorch."},
          o.allow_tf32);
}

void describe_fields(TrainOptions& o, FieldVisitor& v) {
  v.field({.name = "max_steps",
           .doc = "Optimizer steps of the run. 0: the run ends after train.epochs. If "
                  "only train.epochs is set, this is 0.",
           .unit = "steps",
           .min = 0,
           .common = true},
          o.max_steps.unmarked());
  v.field({.name = "epochs",
           .doc = "Epochs of the run. 0: run for train.max_steps.",
           .unit = "epochs",
           .min = 0,
           .max = 1e6,
           .common = true},
          o.epochs.unmarked());
  v.field({.name = "batch_size",
           .doc = "Samples per rank and micro-batch; the same as loader.batch_size.",
           .unit = "samples",
           .min = 1,
           .max = 1e7,
           .common = true},
          o.batch_size);
  v.field({.name = "grad_accum_steps",
           .doc = "Micro-batches whose gradients are summed into one optimizer step.",
           .min = 1,
           .max = 1e6,
           .in_loop = true},
          o.grad_accum_steps);
  v.field({.name = "max_grad_norm",
           .doc = "Largest gradient norm; larger gradients are scaled down to it. 0: no clipping.",
           .min = 0,
           .in_loop = true},
          o.max_grad_norm);
  v.field({.name = "non_finite",
           .doc = "Action on inf or NaN in the loss or the gradients. error: end the run with 70. "
                  "skip: drop the update on all ranks. ignore: continue.",
           .in_loop = true},
          o.non_finite,
          {{"error", NonFinite::Error}, {"skip", NonFinite::Skip}, {"ignore", NonFinite::Ignore}});
  describe_targets(o, v);
  describe_evaluation(o, v);
  describe_kernels(o, v);
}

void describe_fields(CheckpointOptions& options, FieldVisitor& visitor) {
  visitor.field({.name = "dir",
                 .doc = "Folder for checkpoints, visible to all ranks. Empty: save nothing.",
                 .common = true},
                options.dir);
  visitor.field({.name = "resume",
                 .doc = "auto: resume from the newest valid checkpoint, if any. never: start "
                        "at step 0; an error if dir holds checkpoints. require: fail without a "
                        "checkpoint. best: evaluate the best one by keep_best; nothing is "
                        "saved."},
                options.resume,
                {{"auto", Resume::Auto},
                 {"never", Resume::Never},
                 {"require", Resume::Require},
                 {"best", Resume::Best}});
  visitor.field({.name = "every_steps",
                 .doc = "Steps between checkpoints. 0: not by steps.",
                 .unit = "steps",
                 .min = 0},
                options.every_steps);
  visitor.field({.name = "every_minutes",
                 .doc = "Minutes between checkpoints. 0: not by time.",
                 .unit = "min",
                 .min = 0},
                options.every_minutes);
  visitor.field({.name = "keep_last", .doc = "Number of newest checkpoints to keep.", .min = 1},
                options.keep_last);
  visitor.field({.name = "keep_best",
                 .doc = "Also keep the best checkpoint. min: smallest test loss. max: largest "
                        "test accuracy. (Own programs: the metric given to "
                        "Checkpointer::save.)"},
                options.keep_best,
                {{"off", KeepBest::Off}, {"min", KeepBest::Min}, {"max", KeepBest::Max}});
  visitor.field({.name = "async", .doc = "Write in the background while training continues."},
                options.async);
  visitor.field({.name = "max_failures",
                 .doc = "Consecutive failed saves after which training ends with exit code 73.",
                 .min = 1},
                options.max_failures);
  visitor.field({.name = "stop_check_seconds",
                 .doc = "Seconds between checks across ranks for a stop request.",
                 .unit = "s",
                 .min = 0.01,
                 .max = 60},
                options.stop_check_seconds);
}

void describe_fields(MetricsOptions& options, FieldVisitor& visitor) {
  visitor.field({.name = "log_every",
                 .doc = "Steps between log lines. Metrics wait for the device only then. 0: no "
                        "lines.",
                 .unit = "steps",
                 .min = 0,
                 .common = true},
                options.log_every);
  visitor.field({.name = "dir", .doc = "Folder for run folders. Empty: no files.", .common = true},
                options.dir);
  visitor.field(
      {.name = "run_name", .doc = "Name of the run folder. Empty: the job id or the time."},
      options.run_name);
  visitor.field({.name = "progress",
                 .doc = "Progress output. auto: a bar on a terminal, plain lines elsewhere."},
                options.progress,
                {{"auto", ProgressStyle::Auto},
                 {"bar", ProgressStyle::Bar},
                 {"plain", ProgressStyle::Plain},
                 {"off", ProgressStyle::Off}});
  visitor.field({.name = "repeat",
                 .doc = "Set by tools/study.py: number of the repeat in a study. Written to "
                        "epochs.csv and epochs.jsonl.",
                 .min = 1},
                options.repeat);
  visitor.field({.name = "csv", .doc = "Write steps.csv, evals.csv and epochs.csv."}, options.csv);
  visitor.field({.name = "jsonl", .doc = "Write steps.jsonl, evals.jsonl and epochs.jsonl."},
                options.jsonl);
  visitor.field({.name = "tensorboard",
                 .doc = "Write event files for TensorBoard: the numbers of all rows, and the "
                        "settings as text and hparams."},
                options.tensorboard);
  visitor.field({.name = "trace_first_step", .doc = "First step of the trace.", .min = 0},
                options.trace_first_step);
  visitor.field({.name = "trace_steps",
                 .doc = "Steps to trace on all ranks into trace.json (Perfetto). 0: none.",
                 .unit = "steps",
                 .min = 0,
                 .max = 10'000},
                options.trace_steps);
  visitor.field({.name = "nvtx", .doc = "Emit NVTX ranges for Nsight Systems."}, options.nvtx);
}

}  // namespace ddp
