// SPDX-License-Identifier: Apache-2.0
// Chooses a rank's device from plain numbers so that every case can be tested.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "ddp/comm/context.hpp"

namespace ddp::detail {

/// Returns whether `device` selects a GPU. Throws SettingsError for Cuda if this build
/// (`built_with_cuda`) or this host has no CUDA.
bool wants_cuda(DeviceChoice device, bool built_with_cuda, int visible_gpus);

/// Returns the index of the rank's GPU among the visible ones: 0 if the launcher shows one GPU per
/// task, else the local rank. Throws SettingsError if the host has more ranks than GPUs.
int choose_gpu(int local_rank, int local_world_size, int visible_gpus, const std::string& host);

/// A rank's device, as reported to the other ranks.
struct DeviceReport {
  std::string host;
  std::string gpu;       ///< identity of the GPU on its host; empty on CPU
  std::string gpu_name;  ///< for messages: its PCI address
  friend auto message_fields(DeviceReport& report) {
    return std::tie(report.host, report.gpu, report.gpu_name);
  }
};

/// Throws SettingsError if two ranks of one host share a GPU, or if only some ranks use GPUs.
void check_devices(const std::vector<DeviceReport>& reports);

/// A rank's place among the ranks of its host, computed from all ranks' reports.
struct LocalPlace {
  int local_rank = 0, local_world_size = 0, node_rank = 0, num_nodes = 0;
};
LocalPlace count_local_place(const std::vector<std::string>& hosts, int rank);

}  // namespace ddp::detail
