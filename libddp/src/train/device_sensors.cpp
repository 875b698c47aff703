// SPDX-License-Identifier: Apache-2.0
#include "train/device_sensors.hpp"

#include <utility>

namespace ddp::detail {

DeviceSensors::DeviceSensors(const std::string& pci_bus_id, TimePoint now)
    : gpu_(pci_bus_id.empty() ? nullptr : GpuMonitor::open(pci_bus_id)), epoch_begin_(now) {
  if (gpu_) {
    sampler_ = std::make_unique<GpuSampler>([gpu = gpu_.get()]() -> GpuNumbers {
      return {.energy_joules = gpu->energy_joules(),
              .utilisation_percent = gpu->utilisation_percent()};
    });
  }
  epoch_energy_ = energy_joules();
}

DeviceSensors::DeviceSensors(GpuSampler::Ask ask, TimePoint now)
    : sampler_(std::make_unique<GpuSampler>(std::move(ask))),
      epoch_energy_(energy_joules()),
      epoch_begin_(now) {}

void DeviceSensors::sample_utilisation() {
  const double utilisation = latest().utilisation_percent;
  if (!std::isnan(utilisation)) {
    utilisation_sum_ += utilisation;
    ++utilisation_samples_;
  }
}

DeviceSensors::EpochUse DeviceSensors::end_epoch(TimePoint now) {
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

}  // namespace ddp::detail
