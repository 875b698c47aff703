// SPDX-License-Identifier: Apache-2.0
// ranks.json: each rank's numbers of the last logging step.
#include "train/metrics/ranks/rank_devices.hpp"

#include <nlohmann/json.hpp>

#include "core/control/wire/message_codec.hpp"
#include "support/catch.hpp"
#include "train/metrics/files/metrics_files.hpp"
#include "unit/train/temporary_folder.hpp"

namespace {

using ddp::detail::MetricsFiles;
using ddp::detail::RankNumbers;
using testing::read_file;
using testing::TemporaryFolder;

std::vector<RankNumbers> gpu_and_cpu() {
  RankNumbers gpu{.samples = 64, .seconds = 2, .steps = 4, .exposed_comm_ms = 25, .memory_gib = 3};
  gpu.device = {.host = "n1",
                .name = "cuda:0",
                .type = "H100",
                .pci_bus_id = "0000:65:00.0",
                .numbers = {.temperature_c = 61, .power_w = 400}};
  RankNumbers cpu{.seconds = 2, .steps = 4};
  cpu.device = {.host = "n2", .name = "cpu"};
  return {gpu, cpu};
}

nlohmann::json record_of(const ddp::detail::RanksRecord& record) {
  return nlohmann::json::parse(ddp::detail::ranks_json(record, gpu_and_cpu(), {}));
}

}  // namespace

TEST_CASE("the record has what each rank knows") {
  const auto json =
      record_of({.step = 20, .max_steps = 100, .unix_time = 5, .sample_unit = "images"});
  REQUIRE(json == nlohmann::json::parse(R"({"time": 5.0, "step": 20, "max_steps": 100, "ranks": [
    {"rank": 0, "step_ms": 500.0, "images_per_second": 32.0, "exposed_comm_ms": 25.0,
     "memory_gib": 3.0, "host": "n1", "device": "cuda:0", "gpu_type": "H100",
     "pci_bus_id": "0000:65:00.0", "temperature_c": 61.0, "power_w": 400.0},
    {"rank": 1, "step_ms": 500.0, "host": "n2", "device": "cpu"}]})"));
  REQUIRE(!record_of({.step = 20}).contains("max_steps"));
}

TEST_CASE("a rank's device crosses to rank 0") {
  const auto sent = gpu_and_cpu()[0];
  const auto got = ddp::detail::decode_message<RankNumbers>(ddp::detail::encode_message(sent));
  REQUIRE(got.device->pci_bus_id == "0000:65:00.0");
  REQUIRE(got.device->numbers.temperature_c == 61);
  REQUIRE(std::isnan(got.device->numbers.sm_clock_mhz));
}

TEST_CASE("the file is replaced at most once a second, and at the last step") {
  TemporaryFolder folder;
  ddp::MetricsOptions options;
  options.dir = folder.path();
  options.run_name = "run";
  MetricsFiles files(options, {}, /*is_main=*/true);
  const auto step = [&] {
    return nlohmann::json::parse(read_file(folder.file("run/ranks.json"))).at("step").get<int>();
  };
  files.write_ranks(1, 3, gpu_and_cpu(), {});
  REQUIRE(step() == 1);
  files.write_ranks(2, 3, gpu_and_cpu(), {});
  REQUIRE(step() == 1);
  files.write_ranks(3, 3, gpu_and_cpu(), {});
  REQUIRE(step() == 3);
}
