// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "ddp/core/fields.hpp"
#include "ddp/core/taken_mark.hpp"

namespace ddp {

/// Constants of a run, written to every epoch row. Empty or 0 if unknown.
struct RunInfo {
  std::string precision{};          ///< "fp32", "bf16", "fp16"
  int64_t batch_size_per_rank = 0;  ///< samples per optimizer step and rank
  int64_t global_batch_size = 0;    ///< of all ranks; 0: batch_size_per_rank times the ranks
  double bucket_cap_mb = 0;
  std::string sample_unit = "images";  ///< unit of StepMetrics::num_samples; names the rates:
                                       ///< images_per_second, or with "tokens" tokens_per_second
  int64_t max_steps = 0;               ///< for the progress bar and its ETA
  int64_t steps_per_epoch = 0;         ///< for the epoch shown with each step
  std::string settings_text{};  ///< the resolved settings, logged once and saved in the run folder
};

struct MetricsOptions {
  int64_t log_every = 10;         ///< steps between log lines; 0: none
  std::string dir = "runs";       ///< parent of run folders; empty: no files
  std::string run_name = "";      ///< empty: the job id, or the time
  std::string progress = "auto";  ///< auto (a bar on a terminal), bar, plain, off
  int64_t repeat = 1;             ///< number of this run among a study's repeats
  bool csv = true;
  bool jsonl = true;
  int64_t trace_first_step = 0;  ///< first step in the trace
  int64_t trace_steps = 0;       ///< number of traced steps; 0: no trace
  bool nvtx = false;             ///< NVTX ranges, for Nsight

  RunInfo run;                ///< not settings: set by ddp::Config or by the program
  detail::TakenMark taken{};  ///< not a setting: reports to ddp::Config that these options are used
};
void describe_fields(MetricsOptions& options, FieldVisitor& visitor);

}  // namespace ddp
