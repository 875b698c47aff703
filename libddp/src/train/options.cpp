// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/checkpoint_options.hpp"
#include "ddp/train/metrics_options.hpp"

namespace ddp {

void describe_fields(CheckpointOptions& options, FieldVisitor& visitor) {
  visitor.field(
      {.name = "dir", .doc = "folder for checkpoints that all ranks see; empty saves nothing"},
      options.dir);
  visitor.field(
      {.name = "resume",
       .doc = "auto: newest valid checkpoint if there is one; never: start anew; require: "
              "fail without one",
       .choices = {"auto", "never", "require"}},
      options.resume);
  visitor.field({.name = "every_steps",
                 .doc = "save after every so many steps; 0: not by steps",
                 .unit = "steps",
                 .min = 0},
                options.every_steps);
  visitor.field({.name = "every_minutes",
                 .doc = "save after every so many minutes; 0: not by time",
                 .unit = "min",
                 .min = 0},
                options.every_minutes);
  visitor.field(
      {.name = "keep_last", .doc = "how many of the newest checkpoints to keep", .min = 1},
      options.keep_last);
  visitor.field({.name = "keep_best",
                 .doc = "also keep the checkpoint with the smallest or largest metric",
                 .choices = {"off", "min", "max"}},
                options.keep_best);
  visitor.field({.name = "async", .doc = "write in the background while training goes on"},
                options.async);
  visitor.field({.name = "max_failures",
                 .doc = "failed saves in a row after which training ends with exit code 73",
                 .min = 1},
                options.max_failures);
  visitor.field({.name = "stop_check_seconds",
                 .doc = "how often the ranks ask each other whether to stop",
                 .unit = "s",
                 .min = 0.01,
                 .max = 60},
                options.stop_check_seconds);
}

void describe_fields(MetricsOptions& options, FieldVisitor& visitor) {
  visitor.field({.name = "log_every",
                 .doc = "steps between log lines; scalars leave the GPU only then; 0: no lines",
                 .unit = "steps",
                 .min = 0},
                options.log_every);
  visitor.field({.name = "dir", .doc = "folder in which run folders are made; empty: no files"},
                options.dir);
  visitor.field(
      {.name = "run_name", .doc = "name of the run folder; empty: the job id or the time"},
      options.run_name);
  visitor.field({.name = "progress",
                 .doc = "progress bar; auto: a bar on a terminal, plain lines elsewhere",
                 .choices = {"auto", "bar", "plain", "off"}},
                options.progress);
  visitor.field({.name = "repeat",
                 .doc = "number of this run among a study's repeats, a column of epochs.csv",
                 .min = 1},
                options.repeat);
  visitor.field({.name = "csv", .doc = "write steps.csv and epochs.csv"}, options.csv);
  visitor.field({.name = "jsonl", .doc = "write steps.jsonl"}, options.jsonl);
  visitor.field({.name = "trace_first_step", .doc = "first step of the trace", .min = 0},
                options.trace_first_step);
  visitor.field({.name = "trace_steps",
                 .doc = "steps to trace into trace.json (Perfetto), all ranks; 0: none",
                 .unit = "steps",
                 .min = 0,
                 .max = 10'000},
                options.trace_steps);
  visitor.field({.name = "nvtx", .doc = "NVTX ranges for Nsight Systems"}, options.nvtx);
}

}  // namespace ddp
