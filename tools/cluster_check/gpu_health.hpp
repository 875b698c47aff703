// SPDX-License-Identifier: Apache-2.0
// What NVML tells about the health and the clocks of a GPU. Torch-free.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "train/metrics/ranks/gpu_monitor.hpp"

namespace cluster_check {

/// A member without a value: the driver or the GPU cannot tell.
struct GpuHealth {
  std::optional<double> num_gpus;  ///< of the node, also those that this process may not use
  std::optional<double> corrected_ecc_errors, uncorrected_ecc_errors;
  std::optional<double> retired_pages;       ///< or remapped rows, on GPUs that remap
  std::optional<double> row_remaps_pending;  ///< 1: pending or failed
  std::optional<double> pcie_generation, max_pcie_generation, pcie_width, max_pcie_width;
  std::optional<double> memory_free_percent;
  std::optional<std::vector<bool>> nvlinks;  ///< active or not, by link
  std::string driver_version;                ///< empty: unknown
};

/// `gpu` may be nullptr: then everything is unknown.
GpuHealth read_gpu_health(const ddp::detail::GpuMonitor* gpu);

struct GpuClocks {
  std::optional<double> sm_mhz, max_sm_mhz, watts, limit_watts, celsius;
  std::optional<unsigned long long> throttle_reasons;  ///< NVML's bits
};
GpuClocks read_gpu_clocks(const ddp::detail::GpuMonitor* gpu);

}  // namespace cluster_check
