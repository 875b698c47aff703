// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/options.hpp"

namespace ddp {

void describe_fields(CheckpointOptions& options, FieldVisitor& visitor) {
  visitor.field(
      {.name = "dir", .doc = "Folder for checkpoints, visible to all ranks. Empty: save nothing."},
      options.dir);
  visitor.field({.name = "resume",
                 .doc = "auto: resume from the newest valid checkpoint, if any. never: start "
                        "at step 0; an error if dir holds checkpoints. require: fail without a "
                        "checkpoint.",
                 .choices = {"auto", "never", "require"}},
                options.resume);
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
                        "Checkpointer::save.)",
                 .choices = {"off", "min", "max"}},
                options.keep_best);
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
                 .min = 0},
                options.log_every);
  visitor.field({.name = "dir", .doc = "Folder for run folders. Empty: no files."}, options.dir);
  visitor.field(
      {.name = "run_name", .doc = "Name of the run folder. Empty: the job id or the time."},
      options.run_name);
  visitor.field({.name = "progress",
                 .doc = "Progress output. auto: a bar on a terminal, plain lines elsewhere.",
                 .choices = {"auto", "bar", "plain", "off"}},
                options.progress);
  visitor.field({.name = "repeat",
                 .doc = "Set by tools/study.py: number of the repeat in a study. Written to "
                        "epochs.csv.",
                 .min = 1},
                options.repeat);
  visitor.field({.name = "csv", .doc = "Write steps.csv and epochs.csv."}, options.csv);
  visitor.field({.name = "jsonl", .doc = "Write steps.jsonl."}, options.jsonl);
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
