// SPDX-License-Identifier: Apache-2.0
// Chooses a rank's device from plain numbers so that every case can be tested.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/launch/detect_launch.hpp"
#include "ddp/comm/context.hpp"

namespace ddp::detail {

/// Returns whether `device` selects a GPU. Throws SettingsError for Cuda if this build
/// (`built_with_cuda`) or this host has no CUDA.
bool wants_cuda(DeviceChoice device, bool built_with_cuda, int visible_gpus);

/// What this process knows of the GPUs of its host.
struct GpuProbe {
  bool built_with_cuda = false;
  int num_visible = 0;
  std::string cuda_error{};      ///< CUDA's text if counting them failed; empty: it counted
  bool has_driver_file = false;  ///< /dev/nvidiactl: NVIDIA's driver is loaded
};

/// GPUs that this process should have, although none answers.
struct LostGpus {
  /// True if the scheduler or CUDA_VISIBLE_DEVICES promise a GPU, or the driver reports an error.
  /// False if the driver alone is a sign, or if CUDA_VISIBLE_DEVICES hides all GPUs on purpose.
  bool is_certain = false;
  std::string message{};  ///< the sign, the cause and the fix
};
/// Nothing if a GPU answers, or if nothing promises one.
std::optional<LostGpus> find_lost_gpus(const GpuProbe& probe, const EnvironmentLookup& environment,
                                       const std::string& host);

/// Returns the index of the rank's GPU among the visible ones: 0 if the launcher shows one GPU per
/// task, else the local rank. Throws SettingsError if the host has more ranks than GPUs.
int choose_gpu(int local_rank, int local_world_size, int visible_gpus, const std::string& host);

/// A rank's device, as reported to the other ranks.
struct DeviceReport {
  std::string host{};
  std::string gpu{};       ///< identity of the GPU on its host; empty on CPU
  std::string gpu_name{};  ///< for messages: its PCI address
  std::string problem{};   ///< why the rank has no device; empty if it has one
  friend auto message_fields(DeviceReport& report) {
    return std::tie(report.host, report.gpu, report.gpu_name, report.problem);
  }
};

/// Throws SettingsError if a rank has no device, if two ranks of one host share a GPU, or if only
/// some ranks use GPUs.
void check_devices(const std::vector<DeviceReport>& reports);

/// A rank's place among the ranks of its host, computed from all ranks' reports.
struct LocalPlace {
  int local_rank = 0, local_world_size = 0, node_rank = 0, num_nodes = 0;
};
LocalPlace count_local_place(const std::vector<std::string>& hosts, int rank);

}  // namespace ddp::detail
