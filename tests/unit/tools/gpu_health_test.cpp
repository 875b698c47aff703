// SPDX-License-Identifier: Apache-2.0
// What cluster_check and the metrics read from NVML, with a library in its place.
#include "gpu_health.hpp"

#include <chrono>

#include "fake_nvml.hpp"
#include "support/catch.hpp"
#include "train/metrics/ranks/device_sensors.hpp"

using namespace cluster_check;

namespace {

GpuHealth health_of(unsigned int num_links, unsigned int links_down) {
  fake_nvml_num_links = num_links;
  fake_nvml_links_down = links_down;
  const auto gpu = ddp::detail::GpuMonitor::open("0000:65:00.0");
  REQUIRE(gpu != nullptr);
  return read_gpu_health(gpu.get());
}

}  // namespace

TEST_CASE("the state of each NVLink is read, and only of links that the GPU has") {
  const auto all = health_of(18, 0).nvlinks;
  REQUIRE(all);
  CHECK(*all == std::vector<bool>(18, true));
  const auto some = health_of(6, 1U << 4).nvlinks;
  REQUIRE(some);
  CHECK(*some == std::vector<bool>{true, true, true, true, false, true});
  CHECK_FALSE(health_of(0, 0).nvlinks);
}

TEST_CASE("what the driver cannot tell is unknown, the rest is read") {
  const auto health = health_of(0, 0);
  CHECK(health.uncorrected_ecc_errors == 7);
  CHECK(health.corrected_ecc_errors == 40);
  CHECK_FALSE(health.retired_pages);
  CHECK_FALSE(health.pcie_generation);
  CHECK(health.driver_version.empty());
  CHECK(health.memory_free_percent == 25);
  CHECK_FALSE(read_gpu_health(nullptr).num_gpus);
}

TEST_CASE("the clocks of a GPU are read in their units") {
  const auto gpu = ddp::detail::GpuMonitor::open("0000:65:00.0");
  REQUIRE(gpu != nullptr);
  const auto clocks = read_gpu_clocks(gpu.get());
  CHECK(clocks.sm_mhz == 1980);
  CHECK(clocks.celsius == 61);
  CHECK(clocks.watts == 450.5);
  CHECK_FALSE(clocks.max_sm_mhz);
  CHECK(clocks.throttle_reasons == 0x24ULL);
}

TEST_CASE("the sensors of a rank are read in their units, most of them once a second") {
  using std::chrono::milliseconds;
  const auto gpu = ddp::detail::GpuMonitor::open("0000:65:00.0");
  REQUIRE(gpu != nullptr);
  CHECK(gpu->name() == "A GPU");
  const ddp::detail::GpuReader::TimePoint start{};
  fake_nvml_sent = 7;
  ddp::detail::GpuReader reader(*gpu, start);
  const auto early = reader.read(start + milliseconds(500));
  CHECK(early.energy_joules == 5e6);
  CHECK(early.utilisation_percent == 73);
  CHECK(std::isnan(early.power_w));
  fake_nvml_sent += 1'000'000;
  const auto late = reader.read(start + milliseconds(2000));
  CHECK(late.memory_total_gib == 80);
  CHECK(late.temperature_c == 61);
  CHECK(late.power_w == 450.5);
  CHECK(late.sm_clock_mhz == 1980);
  CHECK(late.memory_clock_mhz == 2619);
  CHECK(late.throttle_reasons == 0x24);
  CHECK(late.pcie_mb_per_second == 4.5);
  CHECK(late.nvlink_mb_per_second == 4 * 1024e6 / 2 / 1e6);
}

TEST_CASE("the name of a GPU that is split into instances says so") {
  const auto gpu = ddp::detail::GpuMonitor::open("0000:65:00.0");
  REQUIRE(gpu != nullptr);
  fake_nvml_mig_mode = 1;
  CHECK(gpu->name() == "A GPU MIG");
  fake_nvml_mig_mode = 0;
  CHECK(gpu->name() == "A GPU");
}

TEST_CASE("idle and power are no slowdowns, heat and hardware are") {
  CHECK(ddp::detail::nvml::count_slowdowns(0x1 | 0x4) == 0);
  CHECK(ddp::detail::nvml::count_slowdowns(0x8 | 0x20 | 0x4) == 2);
  CHECK(ddp::detail::nvml::describe_throttle_reasons(0x4 | 0x20) == "power cap, thermal slowdown");
  CHECK(ddp::detail::nvml::describe_throttle_reasons(0) == "none");
}
