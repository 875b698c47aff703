// SPDX-License-Identifier: Apache-2.0
#include "gpu_health.hpp"

namespace cluster_check {
namespace {

using ddp::detail::GpuMonitor;
namespace nvml = ddp::detail::nvml;

std::optional<double> count_retired_pages(const GpuMonitor& gpu) {
  std::optional<double> sum;
  for (const int cause : {nvml::kRetiredSingleBit, nvml::kRetiredDoubleBit}) {
    unsigned int count = 0;
    unsigned long long* const no_addresses = nullptr;  // it then returns the number alone
    const int status = gpu.call("nvmlDeviceGetRetiredPages", cause, &count, no_addresses);
    if (status == nvml::kSuccess || status == nvml::kInsufficientSize) {
      sum = sum.value_or(0) + count;
    }
  }
  return sum;
}

void read_memory_errors(const GpuMonitor& gpu, GpuHealth& health) {
  const auto errors = [&](int type) {
    return gpu.number<unsigned long long>("nvmlDeviceGetTotalEccErrors", type, nvml::kEccVolatile);
  };
  health.corrected_ecc_errors = errors(nvml::kEccCorrected);
  health.uncorrected_ecc_errors = errors(nvml::kEccUncorrected);
  unsigned int corrected = 0, uncorrected = 0, pending = 0, failed = 0;
  if (gpu.call("nvmlDeviceGetRemappedRows", &corrected, &uncorrected, &pending, &failed) ==
      nvml::kSuccess) {
    health.retired_pages = corrected + uncorrected;
    health.row_remaps_pending = pending != 0 || failed != 0 ? 1 : 0;
  } else {
    health.retired_pages = count_retired_pages(gpu);
  }
}

std::optional<std::vector<bool>> read_nvlinks(const GpuMonitor& gpu) {
  std::vector<bool> links;
  for (unsigned int link = 0; link < nvml::kMaxLinks; ++link) {
    if (const auto state = gpu.number("nvmlDeviceGetNvLinkState", link)) {
      links.push_back(*state != 0);
    }
  }
  return links.empty() ? std::nullopt : std::optional(links);
}

}  // namespace

GpuHealth read_gpu_health(const GpuMonitor* gpu) {
  GpuHealth health;
  if (gpu == nullptr) {
    return health;
  }
  unsigned int count = 0;
  if (gpu->library().call("nvmlDeviceGetCount_v2", &count) == nvml::kSuccess) {
    health.num_gpus = count;
  }
  char version[nvml::kVersionBytes] = "";
  if (gpu->library().call("nvmlSystemGetDriverVersion", &version[0], nvml::kVersionBytes) ==
      nvml::kSuccess) {
    health.driver_version = version;
  }
  read_memory_errors(*gpu, health);
  health.pcie_generation = gpu->number("nvmlDeviceGetCurrPcieLinkGeneration");
  health.max_pcie_generation = gpu->number("nvmlDeviceGetMaxPcieLinkGeneration");
  health.pcie_width = gpu->number("nvmlDeviceGetCurrPcieLinkWidth");
  health.max_pcie_width = gpu->number("nvmlDeviceGetMaxPcieLinkWidth");
  nvml::Memory memory{};
  if (gpu->call("nvmlDeviceGetMemoryInfo", &memory) == nvml::kSuccess && memory.total > 0) {
    health.memory_free_percent =
        100 * static_cast<double>(memory.free) / static_cast<double>(memory.total);
  }
  health.nvlinks = read_nvlinks(*gpu);
  return health;
}

GpuClocks read_gpu_clocks(const GpuMonitor* gpu) {
  GpuClocks clocks;
  if (gpu == nullptr) {
    return clocks;
  }
  clocks.sm_mhz = gpu->number("nvmlDeviceGetClockInfo", nvml::kSmClock);
  clocks.max_sm_mhz = gpu->number("nvmlDeviceGetMaxClockInfo", nvml::kSmClock);
  clocks.celsius = gpu->number("nvmlDeviceGetTemperature", nvml::kDieTemperature);
  clocks.watts = gpu->power_watts();
  if (const auto milliwatts = gpu->number("nvmlDeviceGetEnforcedPowerLimit")) {
    clocks.limit_watts = *milliwatts / 1000;
  }
  unsigned long long reasons = 0;
  if (gpu->call("nvmlDeviceGetCurrentClocksThrottleReasons", &reasons) == nvml::kSuccess) {
    clocks.throttle_reasons = reasons;
  }
  return clocks;
}

}  // namespace cluster_check
