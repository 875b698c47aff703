// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/ranks/rank_devices.hpp"

#include <nlohmann/json.hpp>

#include "train/metrics/ranks/metrics_ranks.hpp"
#include "train/metrics/ranks/stragglers.hpp"

namespace ddp::detail {
namespace {

using RankJson = nlohmann::ordered_json;

void add(RankJson& json, const std::string& key, double number) {
  if (std::isfinite(number)) {
    json[key] = number;
  }
}

void add(RankJson& json, const std::string& key, const std::string& text) {
  if (!text.empty()) {
    json[key] = text;
  }
}

void add_device(RankJson& json, const RankDevice& device) {
  add(json, "host", device.host);
  add(json, "device", device.name);
  add(json, "gpu_type", device.type);
  add(json, "pci_bus_id", device.pci_bus_id);
  add(json, "utilisation_percent", device.numbers.utilisation_percent);
  add(json, "memory_total_gib", device.numbers.memory_total_gib);
  add(json, "temperature_c", device.numbers.temperature_c);
  add(json, "power_w", device.numbers.power_w);
  add(json, "sm_clock_mhz", device.numbers.sm_clock_mhz);
  add(json, "memory_clock_mhz", device.numbers.memory_clock_mhz);
  add(json, "pcie_mb_per_second", device.numbers.pcie_mb_per_second);
  add(json, "nvlink_mb_per_second", device.numbers.nvlink_mb_per_second);
}

}  // namespace

std::string ranks_json(const RanksRecord& record, const std::vector<RankNumbers>& ranks,
                       const std::vector<Straggler>& stragglers) {
  RankJson json = {{"time", record.unix_time}, {"step", record.step}};
  if (record.max_steps > 0) {
    json["max_steps"] = record.max_steps;
  }
  json["ranks"] = RankJson::array();
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const RankNumbers& rank = ranks[i];
    RankJson& row = json["ranks"].emplace_back(RankJson{{"rank", i}});
    add(row, "step_ms", rank.steps > 0 ? 1000 * rank.seconds / rank.steps : NAN);
    add(row, record.sample_unit + "_per_second",
        rank.seconds > 0 && rank.samples > 0 ? rank.samples / rank.seconds : NAN);
    add(row, "exposed_comm_ms", rank.exposed_comm_ms);
    add(row, "loader_wait_ms", rank.loader_wait_ms);
    add(row, "memory_gib", rank.memory_gib);
    if (rank.device) {
      add_device(row, *rank.device);
    }
    if (i < stragglers.size() && stragglers[i].since_step >= 0) {
      row["slow_since_step"] = stragglers[i].since_step;
      row["slow_because"] = stragglers[i].cause;
    }
  }
  return json.dump(-1, ' ', false, RankJson::error_handler_t::replace) + "\n";
}

}  // namespace ddp::detail
