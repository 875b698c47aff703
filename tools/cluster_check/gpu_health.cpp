// SPDX-License-Identifier: Apache-2.0
#include "gpu_health.hpp"

#include <bit>
#include <cmath>

namespace cluster_check {
namespace {

using ddp::detail::GpuMonitor;

// Constants and layouts of nvml.h (NVML API reference guide), which may not be installed. NVIDIA
// keeps the ABI of these functions.
constexpr int kSuccess = 0;
constexpr int kClockSm = 1;         // nvmlClockType_t
constexpr int kTemperatureGpu = 0;  // nvmlTemperatureSensors_t
constexpr int kEccCorrected = 0;    // nvmlMemoryErrorType_t
constexpr int kEccUncorrected = 1;
constexpr int kEccVolatile = 0;       // nvmlEccCounterType_t: since the driver was loaded
constexpr int kRetiredSingleBit = 0;  // nvmlPageRetirementCause_t
constexpr int kRetiredDoubleBit = 1;
constexpr unsigned int kMaxNvLinks = 18;  // NVML_NVLINK_MAX_LINKS
constexpr unsigned int kVersionBytes = 80;

struct Memory {  // nvmlMemory_t
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

/// Calls NVML's `symbol`, if the driver has it, with the GPU's handle before `arguments`.
template <typename... Args>
bool call(const GpuMonitor& gpu, const char* symbol, Args... arguments) {
  const auto function = reinterpret_cast<int (*)(void*, Args...)>(gpu.find(symbol));
  return function != nullptr && function(gpu.handle(), arguments...) == kSuccess;
}

/// The one number that `symbol` writes, after `arguments`.
template <typename Number = unsigned int, typename... Args>
std::optional<double> number(const GpuMonitor& gpu, const char* symbol, Args... arguments) {
  Number value{};
  if (!call(gpu, symbol, arguments..., &value)) {
    return std::nullopt;
  }
  return static_cast<double>(value);
}

std::optional<double> count_retired_pages(const GpuMonitor& gpu) {
  std::optional<double> sum;
  for (const int cause : {kRetiredSingleBit, kRetiredDoubleBit}) {
    unsigned int count = 0;
    // Without room for addresses it returns the number and NVML_ERROR_INSUFFICIENT_SIZE (7).
    const auto function = reinterpret_cast<int (*)(void*, int, unsigned int*, unsigned long long*)>(
        gpu.find("nvmlDeviceGetRetiredPages"));
    const int status = function == nullptr ? -1 : function(gpu.handle(), cause, &count, nullptr);
    if (status == kSuccess || status == 7) {
      sum = sum.value_or(0) + count;
    }
  }
  return sum;
}

void read_memory_errors(const GpuMonitor& gpu, GpuHealth& health) {
  using Counter = unsigned long long;
  health.corrected_ecc_errors =
      number<Counter>(gpu, "nvmlDeviceGetTotalEccErrors", kEccCorrected, kEccVolatile);
  health.uncorrected_ecc_errors =
      number<Counter>(gpu, "nvmlDeviceGetTotalEccErrors", kEccUncorrected, kEccVolatile);
  unsigned int corrected = 0, uncorrected = 0, pending = 0, failed = 0;
  if (call(gpu, "nvmlDeviceGetRemappedRows", &corrected, &uncorrected, &pending, &failed)) {
    health.retired_pages = corrected + uncorrected;
    health.row_remaps_pending = pending != 0 || failed != 0 ? 1 : 0;
  } else {
    health.retired_pages = count_retired_pages(gpu);
  }
}

std::optional<std::vector<bool>> read_nvlinks(const GpuMonitor& gpu) {
  std::vector<bool> links;
  for (unsigned int link = 0; link < kMaxNvLinks; ++link) {
    if (const auto state = number(gpu, "nvmlDeviceGetNvLinkState", link)) {
      links.push_back(*state != 0);
    }
  }
  return links.empty() ? std::nullopt : std::optional(links);
}

struct Reason {
  unsigned long long bit;  // nvmlClocksEventReasons
  const char* name;
  bool is_slowdown;
};
constexpr Reason kReasons[] = {{0x1, "idle", false},
                               {0x2, "application clocks", false},
                               {0x4, "power cap", false},
                               {0x8, "hardware slowdown", true},
                               {0x10, "sync boost", false},
                               {0x20, "thermal slowdown", true},
                               {0x40, "hardware thermal slowdown", true},
                               {0x80, "power brake", true},
                               {0x100, "display clocks", false}};

}  // namespace

GpuHealth read_gpu_health(const GpuMonitor* gpu) {
  GpuHealth health;
  if (gpu == nullptr) {
    return health;
  }
  unsigned int count = 0;
  const auto get_count =
      reinterpret_cast<int (*)(unsigned int*)>(gpu->find("nvmlDeviceGetCount_v2"));
  if (get_count != nullptr && get_count(&count) == kSuccess) {
    health.num_gpus = count;
  }
  char version[kVersionBytes] = "";
  const auto get_version =
      reinterpret_cast<int (*)(char*, unsigned int)>(gpu->find("nvmlSystemGetDriverVersion"));
  if (get_version != nullptr && get_version(version, kVersionBytes) == kSuccess) {
    health.driver_version = version;
  }
  read_memory_errors(*gpu, health);
  health.pcie_generation = number(*gpu, "nvmlDeviceGetCurrPcieLinkGeneration");
  health.max_pcie_generation = number(*gpu, "nvmlDeviceGetMaxPcieLinkGeneration");
  health.pcie_width = number(*gpu, "nvmlDeviceGetCurrPcieLinkWidth");
  health.max_pcie_width = number(*gpu, "nvmlDeviceGetMaxPcieLinkWidth");
  Memory memory{};
  if (call(*gpu, "nvmlDeviceGetMemoryInfo", &memory) && memory.total > 0) {
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
  clocks.sm_mhz = number(*gpu, "nvmlDeviceGetClockInfo", kClockSm);
  clocks.max_sm_mhz = number(*gpu, "nvmlDeviceGetMaxClockInfo", kClockSm);
  clocks.celsius = number(*gpu, "nvmlDeviceGetTemperature", kTemperatureGpu);
  if (const double watts = gpu->power_watts(); !std::isnan(watts)) {
    clocks.watts = watts;
  }
  if (const auto milliwatts = number(*gpu, "nvmlDeviceGetEnforcedPowerLimit")) {
    clocks.limit_watts = *milliwatts / 1000;
  }
  unsigned long long reasons = 0;
  if (call(*gpu, "nvmlDeviceGetCurrentClocksThrottleReasons", &reasons)) {
    clocks.throttle_reasons = reasons;
  }
  return clocks;
}

int count_slowdowns(unsigned long long reasons) {
  unsigned long long bits = 0;
  for (const auto& reason : kReasons) {
    bits |= reason.is_slowdown ? reason.bit : 0;
  }
  return std::popcount(reasons & bits);
}

std::string describe_throttle_reasons(unsigned long long reasons) {
  std::string text;
  for (const auto& reason : kReasons) {
    if ((reasons & reason.bit) != 0) {
      text += (text.empty() ? "" : ", ") + std::string(reason.name);
    }
  }
  return text.empty() ? "none" : text;
}

}  // namespace cluster_check
