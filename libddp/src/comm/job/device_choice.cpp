// SPDX-License-Identifier: Apache-2.0
#include "comm/job/device_choice.hpp"

#include <algorithm>
#include <map>

#include "ddp/core/error.hpp"

namespace ddp::detail {

bool wants_cuda(DeviceChoice device, bool built_with_cuda, int visible_gpus) {
  if (device == DeviceChoice::Cuda && !built_with_cuda) {
    throw SettingsError(
        "context.device=cuda, but this libddp was built without CUDA; fix: build it where nvcc and "
        "NCCL are found, or use context.device=cpu");
  }
  if (device == DeviceChoice::Cuda && visible_gpus == 0) {
    throw SettingsError(
        "context.device=cuda, but no GPU is visible; fix: see nvidia-smi and CUDA_VISIBLE_DEVICES, "
        "or "
        "use context.device=cpu");
  }
  return device != DeviceChoice::Cpu && built_with_cuda && visible_gpus > 0;
}

int choose_gpu(int local_rank, int local_world_size, int visible_gpus, const std::string& host) {
  if (visible_gpus == 1) {
    return 0;  // one GPU per task; check_devices() detects shared ones
  }
  if (local_rank >= visible_gpus) {
    throw SettingsError(
        concat(local_world_size, " ranks on ", host, ", but only ", visible_gpus,
               " GPUs are visible there (CUDA_VISIBLE_DEVICES); fix: start at most ", visible_gpus,
               " ranks per node, or use context.device=cpu"));
  }
  return local_rank;
}

void check_devices(const std::vector<DeviceReport>& reports) {
  std::map<std::string, std::size_t> owners;
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    const auto& report = reports[rank];
    if (report.gpu.empty() != reports[0].gpu.empty()) {
      throw SettingsError(concat("rank 0 trains on ", reports[0].gpu.empty() ? "the CPU" : "a GPU",
                                 ", rank ", rank, " (", report.host, ") on ",
                                 report.gpu.empty() ? "the CPU" : "a GPU",
                                 "; fix: set context.device to cpu or cuda for all ranks"));
    }
    if (report.gpu.empty()) {
      continue;
    }
    const auto [owner, is_new] = owners.emplace(report.host + " " + report.gpu, rank);
    if (!is_new) {
      const auto on_host =
          std::count_if(reports.begin(), reports.end(),
                        [&](const DeviceReport& other) { return other.host == report.host; });
      throw SettingsError(
          concat("ranks ", owner->second, " and ", rank, " have the same GPU (", report.gpu_name,
                 " of ", report.host, ", which runs ", on_host,
                 " ranks); fix: start at most one rank per GPU, with fewer tasks per node or one "
                 "GPU per task (--gpus-per-task=1)"));
    }
  }
}

LocalPlace count_local_place(const std::vector<std::string>& hosts, int rank) {
  LocalPlace place;
  std::vector<std::string> nodes;  // ordered by their first ranks
  const auto& own = hosts.at(static_cast<std::size_t>(rank));
  for (std::size_t other = 0; other < hosts.size(); ++other) {
    if (std::find(nodes.begin(), nodes.end(), hosts[other]) == nodes.end()) {
      if (hosts[other] == own) {
        place.node_rank = static_cast<int>(nodes.size());
      }
      nodes.push_back(hosts[other]);
    }
    place.local_rank += hosts[other] == own && other < static_cast<std::size_t>(rank) ? 1 : 0;
    place.local_world_size += hosts[other] == own ? 1 : 0;
  }
  place.num_nodes = static_cast<int>(nodes.size());
  return place;
}

}  // namespace ddp::detail
