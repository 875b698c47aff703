// SPDX-License-Identifier: Apache-2.0
// What NVML says of one GPU. Loaded at run time: machines without a driver lack the library.
#pragma once

#include <cmath>
#include <memory>
#include <string>

namespace ddp::detail {

class GpuMonitor {
 public:
  /// The GPU at `pci_bus_id` ("0000:65:00.0"); nullptr where NVML or the GPU is not there.
  static std::unique_ptr<GpuMonitor> open(const std::string& pci_bus_id);
  ~GpuMonitor();
  GpuMonitor(const GpuMonitor&) = delete;
  GpuMonitor& operator=(const GpuMonitor&) = delete;

  std::string name() const;
  /// NaN where the GPU does not tell.
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

}  // namespace ddp::detail
