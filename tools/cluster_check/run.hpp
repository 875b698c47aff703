// SPDX-License-Identifier: Apache-2.0
// The parts of a run. Each runs on all ranks together and appends this rank's rows.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "ddp/comm/context.hpp"
#include "row.hpp"
#include "train/metrics/ranks/gpu_monitor.hpp"

namespace cluster_check {

struct Options {
  ddp::ContextOptions context;  ///< device= is context.device=
  std::string thresholds = "auto";
  std::string output = "runs/cluster_check";  ///< folder of report.json; empty: none
  std::string write_thresholds;               ///< file; empty: none
  bool quick = false;
};

/// This rank's part of a run.
struct Run {
  ddp::Context& context;
  const Options& options;
  const ddp::detail::GpuMonitor* gpu = nullptr;  ///< nullptr on a CPU and without NVML
  std::string gpu_name{};                        ///< empty on a CPU
  Report report{};                               ///< rows of this rank; points and pairs on rank 0

  bool on_gpu() const { return context.device().is_cuda(); }
  Row& add(const char* group, const std::string& name, std::optional<double> value,
           const char* unit, std::string text = "", int rank = kAllRanks) {
    report.rows.push_back({.group = group,
                           .name = name,
                           .value = value,
                           .unit = unit,
                           .text = std::move(text),
                           .rank = rank});
    return report.rows.back();
  }
  /// A row that rank 0 alone reports, for all ranks.
  void add_for_all(const char* group, const std::string& name, std::optional<double> value,
                   const char* unit, std::string text = "") {
    if (context.is_main()) {
      add(group, name, value, unit, std::move(text));
    }
  }
  /// Shows where the run is, also to peers if it fails.
  void begin(const std::string& part);
};

/// GPUs that Slurm gave this job on this node; 0 if it says nothing.
double gpus_of_job();

void check_health(Run& run);
void check_gpu_speed(Run& run);
void check_collectives(Run& run);
void check_training(Run& run);

}  // namespace cluster_check
