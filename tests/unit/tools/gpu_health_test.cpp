// SPDX-License-Identifier: Apache-2.0
// What cluster_check reads from NVML, with a library in its place.
#include "gpu_health.hpp"

#include "fake_nvml.hpp"
#include "support/catch.hpp"

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
  CHECK_FALSE(read_gpu_health(nullptr).num_gpus);
}

TEST_CASE("idle and power are no slowdowns, heat and hardware are") {
  CHECK(count_slowdowns(0x1 | 0x4) == 0);
  CHECK(count_slowdowns(0x8 | 0x20 | 0x4) == 2);
  CHECK(describe_throttle_reasons(0x4 | 0x20) == "power cap, thermal slowdown");
  CHECK(describe_throttle_reasons(0) == "none");
}
