// SPDX-License-Identifier: Apache-2.0
// How many threads a rank computes with if several ranks of a host run on its CPU.
#pragma once

#include <string>

#include "core/launch/detect_launch.hpp"

namespace ddp::detail {

/// What this process may use of its host.
struct CpuRoom {
  int num_cores = 0;      ///< two hardware threads of one core count once
  bool is_bound = false;  ///< the launcher or the container left it a part of the CPUs
};

/// Cores that a container's quota is worth, of the text of cgroup's cpu.max: "400000 100000" is 4,
/// and "max 100000" is 0 for no quota.
int cores_of_quota(const std::string& text);

/// The rank's share of the cores, or 0: the number of threads stays. It stays if the user chose one
/// and if the rank is bound. LibTorch begins with one thread under mpirun, and with one for each
/// core otherwise.
int choose_threads(const CpuRoom& room, int num_threads, int local_world_size,
                   const EnvironmentLookup& environment);

/// Sets the number of LibTorch's threads. The main rank logs it.
void share_cores(int local_world_size, bool is_main);

}  // namespace ddp::detail
