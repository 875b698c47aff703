// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/ranks/device_sensors.hpp"

#include <utility>

namespace ddp::detail {
namespace {

double energy_joules(const GpuMonitor& gpu) {
  const auto millijoules = gpu.number<unsigned long long>("nvmlDeviceGetTotalEnergyConsumption");
  return millijoules.value_or(NAN) / 1000;
}

double utilisation_percent(const GpuMonitor& gpu) {
  nvml::Utilization value{};
  const int status = gpu.call("nvmlDeviceGetUtilizationRates", &value);
  return status == nvml::kSuccess ? value.gpu : NAN;
}

double memory_total_gib(const GpuMonitor& gpu) {
  nvml::Memory memory{};
  const int status = gpu.call("nvmlDeviceGetMemoryInfo", &memory);
  return status == nvml::kSuccess ? static_cast<double>(memory.total) / (1 << 30) : NAN;
}

double clock_mhz(const GpuMonitor& gpu, int type) {
  return gpu.number("nvmlDeviceGetClockInfo", type).value_or(NAN);
}

/// Of both directions. Each takes 20 ms.
double pcie_mb_per_second(const GpuMonitor& gpu) {
  const auto kilobytes = [&](int direction) {
    return gpu.number("nvmlDeviceGetPcieThroughput", direction).value_or(NAN);
  };
  return (kilobytes(nvml::kPcieSent) + kilobytes(nvml::kPcieReceived)) / 1000;
}

/// Of all links and both directions, since the driver was loaded.
double nvlink_bytes(const GpuMonitor& gpu) {
  nvml::FieldValue values[2] = {};
  values[0].field = nvml::kNvlinkSent;
  values[1].field = nvml::kNvlinkReceived;
  values[0].scope = values[1].scope = nvml::kAllLinks;
  const bool good = gpu.call("nvmlDeviceGetFieldValues", 2, &values[0]) == nvml::kSuccess &&
                    values[0].result == nvml::kSuccess && values[1].result == nvml::kSuccess;
  return good ? 1024 * (static_cast<double>(values[0].value) + static_cast<double>(values[1].value))
              : NAN;
}

}  // namespace

GpuReader::GpuReader(const GpuMonitor& gpu, TimePoint now)
    : gpu_(gpu), nvlink_bytes_(nvlink_bytes(gpu)), others_at_(now) {}

GpuNumbers GpuReader::read(TimePoint now) {
  numbers_.energy_joules = energy_joules(gpu_);
  numbers_.utilisation_percent = utilisation_percent(gpu_);
  if (now - others_at_ < kOthersPeriod) {
    return numbers_;
  }
  const double seconds = std::chrono::duration<double>(now - others_at_).count();
  const double bytes = nvlink_bytes(gpu_);
  others_at_ = now;
  numbers_.memory_total_gib = memory_total_gib(gpu_);
  numbers_.temperature_c =
      gpu_.number("nvmlDeviceGetTemperature", nvml::kDieTemperature).value_or(NAN);
  numbers_.power_w = gpu_.power_watts().value_or(NAN);
  numbers_.sm_clock_mhz = clock_mhz(gpu_, nvml::kSmClock);
  numbers_.memory_clock_mhz = clock_mhz(gpu_, nvml::kMemoryClock);
  numbers_.throttle_reasons =
      gpu_.number<unsigned long long>("nvmlDeviceGetCurrentClocksThrottleReasons").value_or(NAN);
  numbers_.pcie_mb_per_second = pcie_mb_per_second(gpu_);
  numbers_.nvlink_mb_per_second = (bytes - std::exchange(nvlink_bytes_, bytes)) / seconds / 1e6;
  return numbers_;
}

}  // namespace ddp::detail
