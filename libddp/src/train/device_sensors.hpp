// SPDX-License-Identifier: Apache-2.0
// A device's energy counter, and its utilisation and power over an epoch. Torch-free.
#pragma once

#include <chrono>
#include <cmath>
#include <memory>
#include <string>

#include "train/gpu_monitor.hpp"

namespace ddp::detail {

/// Numbers that the device does not report are NaN; on a CPU all are.
class DeviceSensors {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  /// `pci_bus_id` is empty for a CPU.
  DeviceSensors(const std::string& pci_bus_id, TimePoint now);
  /// Without a monitor: a device that reports what `ask` returns.
  DeviceSensors(GpuSampler::Ask ask, TimePoint now);

  /// Empty if unknown.
  std::string gpu_name() const { return gpu_ ? gpu_->name() : ""; }
  double energy_joules() const { return latest().energy_joules; }

  /// Adds a sample to the epoch's mean utilisation.
  void sample_utilisation();
  struct EpochUse {
    double utilisation = NAN;  ///< percent, mean of the samples
    double power_w = NAN;      ///< mean; of this moment if the device has no energy counter
  };
  /// Ends the epoch at `now`.
  EpochUse end_epoch(TimePoint now);
  /// Its time begins at `now`, its energy at the last end_epoch().
  void begin_epoch(TimePoint now) { epoch_begin_ = now; }

 private:
  GpuNumbers latest() const { return sampler_ ? sampler_->latest() : GpuNumbers{}; }

  std::unique_ptr<GpuMonitor> gpu_;
  std::unique_ptr<GpuSampler> sampler_;  // may sample gpu_: ends before it
  double utilisation_sum_ = 0;
  int utilisation_samples_ = 0;
  double epoch_energy_ = NAN;  ///< the counter when the epoch began
  TimePoint epoch_begin_;
};

}  // namespace ddp::detail
