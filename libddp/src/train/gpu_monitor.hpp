// SPDX-License-Identifier: Apache-2.0
// Reads NVML's data of one GPU. Loaded at run time: machines without a driver lack the library.
#pragma once

#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "train/periodic_task.hpp"

namespace ddp::detail {

class GpuMonitor {
 public:
  /// Opens the GPU at `pci_bus_id` ("0000:65:00.0"); nullptr if NVML or the GPU is missing.
  static std::unique_ptr<GpuMonitor> open(const std::string& pci_bus_id);
  ~GpuMonitor();
  GpuMonitor(const GpuMonitor&) = delete;
  GpuMonitor& operator=(const GpuMonitor&) = delete;

  std::string name() const;
  /// NaN if the GPU does not report it.
  double utilisation_percent() const;
  double power_watts() const;
  double energy_joules() const;  ///< since the driver was loaded
  double used_memory_gib() const;

 private:
  struct Library;
  GpuMonitor(std::unique_ptr<Library> library, void* device);
  std::unique_ptr<Library> library_;
  void* device_;
};

/// Polled numbers of a GPU; NaN if not reported.
struct GpuNumbers {
  double energy_joules = NAN;
  double utilisation_percent = NAN;
};

/// Polls from its own thread, because a query takes NVML milliseconds, for which steps would wait.
/// NVML's counters change about ten times a second.
class GpuSampler {
 public:
  using Ask = std::function<GpuNumbers()>;
  static constexpr std::chrono::milliseconds kPeriod{50};

  /// Waits for the first answer.
  explicit GpuSampler(Ask ask, std::chrono::milliseconds period = kPeriod);

  /// The last answer; never waits for the GPU.
  GpuNumbers latest() const;

 private:
  void ask_again();

  const Ask ask_;
  mutable std::mutex mutex_;  // guards latest_
  GpuNumbers latest_;
  PeriodicTask task_;  // last: it uses the members above
};

}  // namespace ddp::detail
