// SPDX-License-Identifier: Apache-2.0
// A device's numbers over an epoch, with a device that the test invents.
#include <atomic>
#include <thread>

#include "support/catch.hpp"
#include "train/metrics/ranks/device_sensors.hpp"

namespace {

using namespace std::chrono_literals;
using ddp::detail::DeviceSensors;
using ddp::detail::GpuNumbers;

const DeviceSensors::TimePoint kEpochBegin{};

// Reports what the test sets.
struct InventedGpu {
  std::atomic<double> energy{1000};
  std::atomic<double> utilisation{50};
  DeviceSensors sensors{[this]() -> GpuNumbers {
                          return {.energy_joules = energy, .utilisation_percent = utilisation};
                        },
                        kEpochBegin};
  void set(double next_energy, double next_utilisation) {
    utilisation = next_utilisation;
    energy = next_energy;
    while (sensors.energy_joules() != next_energy) {  // the next poll
      std::this_thread::sleep_for(1ms);
    }
  }
};

}  // namespace

TEST_CASE("an epoch's power is its energy over its time, its utilisation the samples' mean") {
  InventedGpu gpu;
  gpu.sensors.sample_utilisation();
  gpu.set(1600, 80);
  gpu.sensors.sample_utilisation();
  const auto first = gpu.sensors.end_epoch(kEpochBegin + 3s);
  REQUIRE(first.power_w == 200);
  REQUIRE(first.utilisation == 65);

  gpu.sensors.begin_epoch(kEpochBegin + 10s);
  gpu.set(1650, 70);
  gpu.sensors.sample_utilisation();
  gpu.set(1700, NAN);
  gpu.sensors.sample_utilisation();  // unknown: not a sample
  const auto second = gpu.sensors.end_epoch(kEpochBegin + 12s);
  REQUIRE(second.power_w == 50);
  REQUIRE(second.utilisation == 70);
}

TEST_CASE("a CPU has no sensors") {
  DeviceSensors sensors("", kEpochBegin);
  sensors.sample_utilisation();
  REQUIRE(sensors.gpu_name().empty());
  REQUIRE(std::isnan(sensors.energy_joules()));
  const auto use = sensors.end_epoch(kEpochBegin + 1s);
  REQUIRE(std::isnan(use.power_w));
  REQUIRE(std::isnan(use.utilisation));
}
