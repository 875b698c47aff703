// SPDX-License-Identifier: Apache-2.0
#include "comm/job/device_choice.hpp"

#include <algorithm>
#include <cctype>
#include <map>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

// Whether this value of CUDA_VISIBLE_DEVICES names a device. Slurm writes "NoDevFiles" for none.
bool names_devices(const std::string& value) {
  return value.starts_with("GPU-") || value.starts_with("MIG-") ||
         (!value.empty() && std::isdigit(static_cast<unsigned char>(value.front())) != 0);
}

// The variable by which somebody gave this process GPUs: "SLURM_GPUS_ON_NODE is set (4)". Empty:
// nobody did. Containers set NVIDIA_VISIBLE_DEVICES=all on machines without GPUs too.
std::string find_allocation(const EnvironmentLookup& environment) {
  for (const char* name : {"SLURM_GPUS_ON_NODE", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"}) {
    const auto value = environment(name).value_or("");
    const bool is_count = std::string(name) == "SLURM_GPUS_ON_NODE";
    if (!value.empty() && !(is_count && value == "0")) {
      return concat(name, " is set (", value.substr(0, 80), ")");
    }
  }
  const auto visible = environment("CUDA_VISIBLE_DEVICES").value_or("");
  return names_devices(visible)
             ? concat("CUDA_VISIBLE_DEVICES is set (", visible.substr(0, 80), ")")
             : "";
}

// Why no GPU answers, and the fix.
std::string explain(const GpuProbe& probe, bool is_hidden) {
  if (!probe.built_with_cuda) {
    return "this libddp was built without CUDA; fix: build it where nvcc and a LibTorch with CUDA "
           "are found (-DDDP_WITH_CUDA=ON reports what is missing)";
  }
  if (is_hidden) {
    return "CUDA_VISIBLE_DEVICES hides all of them; fix: unset it";
  }
  if (!probe.has_driver_file) {
    return "/dev/nvidiactl is missing, so this host or container has no NVIDIA driver; fix: start "
           "the program where nvidia-smi lists GPUs";
  }
  if (!probe.cuda_error.empty()) {
    return concat("CUDA reports: ", probe.cuda_error,
                  "; fix: see nvidia-smi, and repair the GPU or the driver");
  }
  return "CUDA finds no device that this process may use; fix: compare nvidia-smi with "
         "CUDA_VISIBLE_DEVICES, and request GPUs for this step too (srun --gpus-per-task=1)";
}

}  // namespace

std::optional<LostGpus> find_lost_gpus(const GpuProbe& probe, const EnvironmentLookup& environment,
                                       const std::string& host) {
  if (probe.num_visible > 0) {
    return std::nullopt;
  }
  const auto visible = environment("CUDA_VISIBLE_DEVICES");
  const bool is_hidden = visible && (visible->empty() || *visible == "-1");
  std::string sign = find_allocation(environment);
  const bool is_promised = !sign.empty();
  if (sign.empty() && probe.has_driver_file && !is_hidden) {
    sign = "/dev/nvidiactl exists";
  }
  if (sign.empty()) {
    return std::nullopt;
  }
  const bool is_broken = probe.built_with_cuda && !probe.cuda_error.empty();
  return LostGpus{
      .is_certain = !is_hidden && (is_promised || is_broken),
      .message = concat("context.device=auto finds no usable GPU on ", host, ", but ", sign, ": ",
                        explain(probe, is_hidden), ", or choose the CPU by context.device=cpu")};
}

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
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    const auto& [host, gpu, gpu_name, problem] = reports[rank];
    if (!problem.empty()) {
      throw SettingsError(reports.size() == 1 ? problem
                                              : concat("rank ", rank, " (", host, "): ", problem));
    }
  }
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
