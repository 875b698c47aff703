// SPDX-License-Identifier: Apache-2.0
// A device's energy counter, its utilisation and power over an epoch, and the latest numbers of its
// state. Torch-free.
#pragma once

#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "train/background_task.hpp"
#include "train/metrics/ranks/gpu_monitor.hpp"

namespace ddp::detail {

/// Polled numbers of a GPU; NaN if not reported.
struct GpuNumbers {
  double energy_joules = NAN;
  double utilisation_percent = NAN;
  double memory_total_gib = NAN;
  double temperature_c = NAN;
  double power_w = NAN;
  double sm_clock_mhz = NAN;
  double memory_clock_mhz = NAN;
  double throttle_reasons = NAN;      ///< NVML's bits
  double pcie_mb_per_second = NAN;    ///< both directions
  double nvlink_mb_per_second = NAN;  ///< of all links, both directions

  friend auto message_fields(GpuNumbers& n) {
    return std::tie(n.energy_joules, n.utilisation_percent, n.memory_total_gib, n.temperature_c,
                    n.power_w, n.sm_clock_mhz, n.memory_clock_mhz, n.throttle_reasons,
                    n.pcie_mb_per_second, n.nvlink_mb_per_second);
  }
};

/// Reads energy and utilisation each time, and the other numbers once a second: these take longer.
class GpuReader {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  static constexpr std::chrono::seconds kOthersPeriod{1};

  GpuReader(const GpuMonitor& gpu, TimePoint now);
  GpuNumbers read(TimePoint now);

 private:
  const GpuMonitor& gpu_;
  GpuNumbers numbers_;
  double nvlink_bytes_;
  TimePoint others_at_;
};

/// Polls from its own thread: a query takes NVML milliseconds, and steps must not wait for it.
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
      sampler_ = std::make_unique<GpuSampler>([reader = GpuReader(*gpu_, now)]() mutable {
        return reader.read(std::chrono::steady_clock::now());
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
  /// The last poll.
  GpuNumbers latest() const { return sampler_ ? sampler_->latest() : GpuNumbers{}; }

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
        .power_w = std::isnan(energy) && gpu_ ? gpu_->power_watts().value_or(NAN)
                                              : (energy - epoch_energy_) / seconds};
    utilisation_sum_ = 0;
    utilisation_samples_ = 0;
    epoch_energy_ = energy;
    return use;
  }
  /// The epoch's time begins at `now`, its energy at the last end_epoch().
  void begin_epoch(TimePoint now) { epoch_begin_ = now; }

 private:
  std::unique_ptr<GpuMonitor> gpu_;
  std::unique_ptr<GpuSampler> sampler_;  // may sample gpu_: ends before it
  double utilisation_sum_ = 0;
  int utilisation_samples_ = 0;
  double epoch_energy_ = NAN;  ///< the counter when the epoch began
  TimePoint epoch_begin_;
};

}  // namespace ddp::detail
