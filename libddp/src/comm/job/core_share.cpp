// SPDX-License-Identifier: Apache-2.0
#include "comm/job/core_share.hpp"

#include <ATen/Parallel.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>

#include "core/files/file_ops.hpp"
#include "core/settings/parse_number.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

int leading_number(const std::string& text, int otherwise) {
  return parse_number<int>(text.substr(0, text.find_first_not_of("0123456789")))
      .value_or(otherwise);
}

int count_cores(const cpu_set_t& cpus) {
  int num_cores = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &cpus)) {
      // "0,8" or "0-1"
      const auto siblings =
          kernel_text(concat("/sys/devices/system/cpu/cpu", cpu, "/topology/thread_siblings_list"));
      num_cores += leading_number(siblings, cpu) == cpu ? 1 : 0;
    }
  }
  return num_cores;
}

CpuRoom find_room() {
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof cpus, &cpus) != 0) {
    return {.is_bound = true};
  }
  CpuRoom room{.num_cores = count_cores(cpus),
               .is_bound = CPU_COUNT(&cpus) != sysconf(_SC_NPROCESSORS_ONLN)};
  std::string quota = kernel_text("/sys/fs/cgroup/cpu.max");
  if (quota.empty()) {  // the first version of cgroups
    quota = concat(kernel_text("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), " ",
                   kernel_text("/sys/fs/cgroup/cpu/cpu.cfs_period_us"));
  }
  if (const int limit = cores_of_quota(quota); limit > 0) {
    room.num_cores = std::min(room.num_cores, limit);
  }
  return room;
}

}  // namespace

int cores_of_quota(const std::string& text) {
  const auto second = text.find_first_of("0123456789", text.find_first_of(" \n"));
  const int quota = leading_number(text, 0);
  const int period = second == std::string::npos ? 0 : leading_number(text.substr(second), 0);
  return quota > 0 && period > 0 ? std::max(1, quota / period) : 0;
}

int choose_threads(const CpuRoom& room, int num_threads, int local_world_size,
                   const EnvironmentLookup& environment) {
  const bool is_chosen = environment("OMP_NUM_THREADS") || environment("MKL_NUM_THREADS");
  if (local_world_size < 2 || is_chosen || room.is_bound) {
    return 0;
  }
  const int share = std::max(1, room.num_cores / local_world_size);
  return share == num_threads ? 0 : share;
}

void share_cores(int local_world_size, bool is_main) {
  const auto room = find_room();
  const int num_threads =
      choose_threads(room, at::get_num_threads(), local_world_size, process_environment());
  if (num_threads == 0) {
    return;
  }
  at::set_num_threads(num_threads);
  if (is_main) {
    log_info(concat(local_world_size, " ranks share the ", room.num_cores, " cores of this host: ",
                    "each computes with ", num_threads, num_threads == 1 ? " thread" : " threads",
                    " (OMP_NUM_THREADS sets another number)"));
  }
}

}  // namespace ddp::detail
