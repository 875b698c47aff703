// SPDX-License-Identifier: Apache-2.0
// Which device a rank trains on, decided by plain numbers so that every case can be tested.
#pragma once

#include <string>
#include <vector>

namespace ddp::detail {

/// Whether `device` ("auto", "cpu", "cuda") means a GPU. Throws SettingsError for other names, and
/// for "cuda" where this build (`built_with_cuda`) or this host cannot.
bool wants_cuda(const std::string& device, bool built_with_cuda, int visible_gpus);

/// The index of the rank's GPU among the visible ones: its local rank where the launcher shows all
/// GPUs to every task, 0 where it shows one to each. Throws SettingsError where the host has more
/// ranks than GPUs.
int choose_gpu(int local_rank, int local_world_size, int visible_gpus, const std::string& host);

/// What a rank tells the others about its device.
struct DeviceReport {
  std::string host;
  std::string gpu;       ///< identity of the GPU on its host; empty on CPU
  std::string gpu_name;  ///< for messages: its PCI address
};

std::string encode_report(const DeviceReport& report);
DeviceReport decode_report(const std::string& bytes);

/// Throws SettingsError where two ranks of one host share a GPU, or some ranks use GPUs and some
/// not.
void check_devices(const std::vector<DeviceReport>& reports);

/// A rank's place among the ranks of its host, counted from what the ranks reported.
struct LocalPlace {
  int local_rank = 0, local_world_size = 0, node_rank = 0, num_nodes = 0;
};
LocalPlace count_local_place(const std::vector<std::string>& hosts, int rank);

}  // namespace ddp::detail
