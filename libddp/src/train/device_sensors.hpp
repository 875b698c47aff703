// SPDX-License-Identifier: Apache-2.0
// A device's energy counter, and its utilisation and power over an epoch. Torch-free.
#pragma once

#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "train/background_task.hpp"

namespace ddp::detail {

/// Reads NVML's data of one GPU. NVML is loaded at run time: machines without a driver lack it.
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

  /// For calls that only one program makes: NVML's function `symbol` (nullptr if this driver lacks
  /// it), and its handle of the GPU.
  void* find(const char* symbol) const;
  void* handle() const { return device_; }

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
  using Query = std::function<GpuNumbers()>;
  static constexpr std::chrono::milliseconds kPeriod{50};

  /// Waits for the first answer.
  explicit GpuSampler(Query query, std::chrono::milliseconds period = kPeriod)
      : query_(std::move(query)), latest_(query_()), task_([this] { poll(); }, period) {}

  /// The last answer; never waits for the GPU.
  GpuNumbers latest() const {
    const std::lock_guard lock(mutex_);
    return latest_;
  }

 private:
  void poll() {
    const auto answer = query_();
    const std::lock_guard lock(mutex_);
    latest_ = answer;
  }

  const Query query_;
  mutable std::mutex mutex_;  // guards latest_
  GpuNumbers latest_;
  PeriodicTask task_;  // last: it uses the members above
};

/// Numbers that the device does not report are NaN; on a CPU all are.
class DeviceSensors {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  /// `pci_bus_id` is empty for a CPU.
  DeviceSensors(const std::string& pci_bus_id, TimePoint now)
      : gpu_(pci_bus_id.empty() ? nullptr : GpuMonitor::open(pci_bus_id)), epoch_begin_(now) {
    if (gpu_) {
      sampler_ = std::make_unique<GpuSampler>([gpu = gpu_.get()]() -> GpuNumbers {
        return {.energy_joules = gpu->energy_joules(),
                .utilisation_percent = gpu->utilisation_percent()};
      });
    }
    epoch_energy_ = energy_joules();
  }
  /// Without a monitor: a device that reports what `query` returns.
  DeviceSensors(GpuSampler::Query query, TimePoint now)
      : sampler_(std::make_unique<GpuSampler>(std::move(query))),
        epoch_energy_(energy_joules()),
        epoch_begin_(now) {}

  /// Empty if unknown.
  std::string gpu_name() const { return gpu_ ? gpu_->name() : ""; }
  double energy_joules() const { return latest().energy_joules; }

  /// Adds a sample to the epoch's mean utilisation.
  void sample_utilisation() {
    const double utilisation = latest().utilisation_percent;
    if (!std::isnan(utilisation)) {
      utilisation_sum_ += utilisation;
      ++utilisation_samples_;
    }
  }
  struct EpochUse {
    double utilisation = NAN;  ///< percent, mean of the samples
    double power_w = NAN;      ///< mean; the current power if the device has no energy counter
  };
  /// Ends the epoch at `now`.
  EpochUse end_epoch(TimePoint now) {
    const double seconds = std::chrono::duration<double>(now - epoch_begin_).count();
    const double energy = energy_joules();
    const EpochUse use{
        .utilisation = utilisation_samples_ > 0 ? utilisation_sum_ / utilisation_samples_ : NAN,
        .power_w =
            std::isnan(energy) && gpu_ ? gpu_->power_watts() : (energy - epoch_energy_) / seconds};
    utilisation_sum_ = 0;
    utilisation_samples_ = 0;
    epoch_energy_ = energy;
    return use;
  }
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
