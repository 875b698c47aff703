// SPDX-License-Identifier: Apache-2.0
// Where each rank runs and the state of its device: ranks.json of the run folder. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "train/metrics/ranks/device_sensors.hpp"

namespace ddp::detail {

struct RankNumbers;

/// A rank for which the others wait: see Stragglers.
struct Straggler {
  int64_t since_step = -1;  ///< the first slow logging step in a row; -1: the rank is no straggler
  std::string cause = "";   ///< of the last slow logging step
};

struct RankDevice {
  std::string host = "";
  std::string name = "";        ///< "cuda:0", "cpu"
  std::string type = "";        ///< "NVIDIA H100 80GB HBM3"; empty for a CPU
  std::string pci_bus_id = "";  ///< empty for a CPU
  GpuNumbers numbers = {};

  friend auto message_fields(RankDevice& d) {
    return std::tie(d.host, d.name, d.type, d.pci_bus_id, d.numbers);
  }
};

/// One JSON object: the step and each rank's numbers at the last logging step. It omits unknown
/// numbers; `max_steps` 0 is unknown. docs/metrics.md lists the keys.
struct RanksRecord {
  int64_t step = 0;
  int64_t max_steps = 0;
  double unix_time = 0;
  std::string sample_unit = "samples";
};
/// `stragglers` by rank; may be empty.
std::string ranks_json(const RanksRecord& record, const std::vector<RankNumbers>& ranks,
                       const std::vector<Straggler>& stragglers);

}  // namespace ddp::detail
