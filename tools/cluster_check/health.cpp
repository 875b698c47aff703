// SPDX-License-Identifier: Apache-2.0
// Health of node and GPU: from NVML, sysfs, limits, and over the control plane.
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "clock_offset.hpp"
#include "core/settings/parse_number.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/text.hpp"
#include "gpu_health.hpp"
#include "run.hpp"
#include "train/program/help_version.hpp"
#include "train/trace/trace.hpp"

namespace cluster_check {
namespace {

namespace fs = std::filesystem;

constexpr double kGib = 1 << 30;
constexpr int kClockRounds = 30;

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::optional<double> available_memory_gib() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  double kib = 0;
  for (std::string rest; file >> key >> kib; std::getline(file, rest)) {
    if (key == "MemAvailable:") {
      return kib * 1024 / kGib;
    }
  }
  return std::nullopt;
}

std::optional<double> total_memory_gib() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  double kib = 0;
  return file >> key >> kib && key == "MemTotal:" ? std::optional(kib * 1024 / kGib) : std::nullopt;
}

/// Free GiB of the file system at `path`.
std::optional<double> free_space_gib(const char* path) {
  struct statvfs stat {};
  if (::statvfs(path, &stat) != 0) {
    return std::nullopt;
  }
  return static_cast<double>(stat.f_bavail) * static_cast<double>(stat.f_frsize) / kGib;
}

struct InfinibandPorts {
  std::optional<double> num_active;  ///< nothing: no InfiniBand devices
  std::string text;
};

// Files of the kernel's stable sysfs ABI: <device>/ports/<port>/state ("4: ACTIVE") and rate.
InfinibandPorts read_infiniband() {
  InfinibandPorts result;
  std::error_code error;
  ddp::detail::TextStream text;
  std::set<fs::path> ports;
  for (const auto& device : fs::directory_iterator("/sys/class/infiniband", error)) {
    for (const auto& port : fs::directory_iterator(device.path() / "ports", error)) {
      ports.insert(port.path());
    }
  }
  for (const auto& port : ports) {
    const auto state = first_line(port / "state");
    const bool active = state.find("ACTIVE") != std::string::npos;
    result.num_active = result.num_active.value_or(0) + (active ? 1 : 0);
    text << (text.str().empty() ? "" : "; ") << port.parent_path().parent_path().filename().string()
         << ':' << port.filename().string() << ' ' << state << ", " << first_line(port / "rate");
  }
  result.text = text.str();
  return result;
}

/// Different GPUs of this node's ranks. Collective.
double gpus_of_ranks(Run& run) {
  const auto own = run.on_gpu() ? ddp::detail::pci_bus_id(run.context.device()) : "";
  const auto bus_ids = run.context.control_plane().all_gather(own);
  const auto nodes = run.context.control_plane().all_gather_numbers({run.context.node_rank()});
  std::set<std::string> found;
  for (std::size_t rank = 0; rank < bus_ids.size(); ++rank) {
    if (nodes[rank][0] == run.context.node_rank() && !bus_ids[rank].empty()) {
      found.insert(bus_ids[rank]);
    }
  }
  return static_cast<double>(found.size());
}

void check_node(Run& run, const GpuHealth& health, double num_used) {
  const int rank = run.context.rank();
  const auto add = [&](const char* name, std::optional<double> value, const char* unit,
                       std::string text = "") {
    run.add("health", name, value, unit, std::move(text), rank);
  };
  const int num_ranks = run.context.local_world_size();
  add("gpus", health.num_gpus, "",
      ddp::concat(num_ranks, num_ranks == 1 ? " rank" : " ranks", " on the node"));
  // A task that Slurm binds to one GPU sees no other, so the ranks count together.
  const double found = std::max(health.num_gpus.value_or(0), num_used);
  const double expected = std::max<double>(num_ranks, gpus_of_job());
  add("gpus_missing", run.on_gpu() ? std::optional(std::max(0.0, expected - found)) : std::nullopt,
      "", run.on_gpu() ? ddp::concat(found, " of ", expected) : "");
  const auto infiniband = read_infiniband();
  add("infiniband_ports", infiniband.num_active, "", infiniband.text);
  add("host_memory_free", available_memory_gib(), "GiB");
  struct rlimit limit {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    add("open_files", static_cast<double>(limit.rlim_cur), "");
  }
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
    const bool unlimited = limit.rlim_cur == RLIM_INFINITY;
    add("locked_memory",
        unlimited ? total_memory_gib() : static_cast<double>(limit.rlim_cur) / kGib, "GiB",
        unlimited ? "unlimited" : "");
  }
  add("shm_free", free_space_gib("/dev/shm"), "GiB");
}

void check_gpu(Run& run, const GpuHealth& health) {
  const int rank = run.context.rank();
  const auto add = [&](const char* name, std::optional<double> value, const char* unit,
                       std::string text = "") {
    run.add("health", name, value, unit, std::move(text), rank);
  };
  add("uncorrected_ecc_errors", health.uncorrected_ecc_errors, "");
  add("corrected_ecc_errors", health.corrected_ecc_errors, "");
  add("retired_pages", health.retired_pages, "");
  add("row_remaps_pending", health.row_remaps_pending, "");
  const auto clocks = read_gpu_clocks(run.gpu);
  add("slowdown_reasons",
      clocks.throttle_reasons
          ? std::optional<double>(ddp::detail::nvml::count_slowdowns(*clocks.throttle_reasons))
          : std::nullopt,
      "",
      clocks.throttle_reasons
          ? ddp::detail::nvml::describe_throttle_reasons(*clocks.throttle_reasons)
          : "");
  // An idle link lowers its generation, so the row holds the one it can reach.
  add("pcie_generation", health.max_pcie_generation, "",
      health.pcie_generation ? ddp::concat("now ", *health.pcie_generation) : "");
  add("pcie_width", health.pcie_width, "lanes",
      health.max_pcie_width ? ddp::concat("of ", *health.max_pcie_width) : "");
  std::optional<double> down;
  std::string links;
  if (health.nvlinks) {
    down = static_cast<double>(std::count(health.nvlinks->begin(), health.nvlinks->end(), false));
    for (std::size_t i = 0; i < health.nvlinks->size(); ++i) {
      links += (*health.nvlinks)[i] ? "" : ddp::concat(links.empty() ? "down: " : ", ", i);
    }
    links = ddp::concat(health.nvlinks->size(), " links", links.empty() ? "" : "; ", links);
  }
  add("nvlinks_down", down, "", links);
  add("gpu_memory_free", health.memory_free_percent, "%");
}

/// A row with the number of different texts, and which ranks differ from the most frequent one.
void compare_ranks(Run& run, const char* name, const std::string& own, bool is_known = true) {
  const auto all = run.context.control_plane().all_gather(own);
  std::map<std::string, std::vector<std::size_t>> ranks_of;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    ranks_of[all[rank]].push_back(rank);
  }
  const auto usual = std::max_element(
      ranks_of.begin(), ranks_of.end(),
      [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  ddp::detail::TextStream text;
  for (const auto& [value, ranks] : ranks_of) {
    if (value != usual->first) {
      text << (text.str().empty() ? "" : "; ") << "rank " << ranks.front();
      if (ranks.size() > 1) {
        text << " and " << ranks.size() - 1 << " more";
      }
      text << ": " << value << " instead of " << usual->first;
    }
  }
  const bool any_known = run.context.control_plane().agree_any(is_known);
  run.add_for_all("health", name,
                  any_known ? std::optional(static_cast<double>(ranks_of.size())) : std::nullopt,
                  "", text.str());
}

std::string versions_of_host(const GpuHealth& health) {
  struct utsname system {};
  ::uname(&system);
  std::string text = ddp::concat("kernel ", system.release);
  if (!health.driver_version.empty()) {
    text += ", driver " + health.driver_version;
  }
  text += ", " + ddp::detail::version_text();
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

// Each round notes this rank's clock before and after a barrier.
ClockOffset measure_clock(ddp::ControlPlane& plane) {
  using Clock = std::chrono::system_clock;
  const auto now_us = [] {
    return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now().time_since_epoch())
        .count();
  };
  std::vector<int64_t> numbers;
  for (int round = 0; round < kClockRounds; ++round) {
    plane.barrier();
    numbers.push_back(now_us());
    plane.barrier();
    numbers.push_back(now_us());
  }
  return bound_offset(numbers, plane.all_gather_numbers(numbers)[0]);
}

void check_clock(Run& run) {
  const auto offset = measure_clock(run.context.control_plane());
  if (run.context.local_rank() != 0) {
    return;
  }
  ddp::detail::TextStream text;
  text.precision(3);
  text << "between " << offset.low << " and " << offset.high << " ms ahead of rank 0";
  run.add("health", "clock_skew", offset.least(), "ms", run.context.is_main() ? "" : text.str(),
          run.context.rank());
}

}  // namespace

double gpus_of_job() {
  const char* text = std::getenv("SLURM_GPUS_ON_NODE");
  return ddp::detail::parse_number<double>(text != nullptr ? text : "").value_or(0);
}

void check_health(Run& run) {
  run.begin("health");
  const auto health = read_gpu_health(run.gpu);
  const double num_used = gpus_of_ranks(run);
  if (run.context.local_rank() == 0) {
    check_node(run, health, num_used);
  }
  check_gpu(run, health);
  compare_ranks(run, "distinct_versions", versions_of_host(health));
  compare_ranks(run, "distinct_gpu_counts",
                health.num_gpus ? ddp::concat(*health.num_gpus, " GPUs") : "unknown",
                health.num_gpus.has_value());
  check_clock(run);
}

}  // namespace cluster_check
