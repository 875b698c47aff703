// SPDX-License-Identifier: Apache-2.0
#include "comm/job/meeting.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "comm/job/core_share.hpp"
#include "comm/job/create_communicator.hpp"
#include "comm/job/cuda_device.hpp"
#include "comm/job/device_choice.hpp"
#include "comm/job/job_rendezvous.hpp"
#include "comm/mpi/start_mpi.hpp"
#include "core/control/wire/message_codec.hpp"
#include "core/control/wire/tcp_socket.hpp"
#include "core/launch/detect_launch.hpp"
#include "core/launch/lone_process.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/check.hpp"

namespace ddp::detail {
namespace {

// Counts attempts, so that all ranks use the same key when they try again after a failure.
int next_attempt() {
  static std::atomic<int> num_attempts{0};
  return num_attempts++;
}

int visible_gpus(const ContextOptions& options) {
  return options.device == DeviceChoice::Cpu ? 0 : count_gpus();
}

// Throws SettingsError if this process should use a GPU and cannot.
bool uses_cuda(const ContextOptions& options) {
  const bool uses = wants_cuda(options.device, built_with_cuda(), visible_gpus(options));
  if (!uses && options.device == DeviceChoice::Auto) {
    if (const auto lost = find_lost_gpus(); lost && lost->is_certain) {
      throw SettingsError(lost->message);
    }
  }
  return uses;
}

// Several ranks first meet as ranks on GPUs, also one whose GPU does not answer. choose_device()
// then reports it to all ranks, which would otherwise wait for this one until a timeout.
bool meets_on_cuda(const ContextOptions& options, int world_size) {
  try {
    return uses_cuda(options);
  } catch (const SettingsError&) {
    if (world_size == 1) {
      throw;
    }
    return true;
  }
}

// Says what is no error: the program may be meant to run like this.
void warn_of_unused_resources(const ContextOptions& options, const LaunchEnvironment& launch,
                              const EnvironmentLookup& environment, bool cuda) {
  if (const auto alone = describe_lone_process(launch, options.launch, environment);
      !alone.empty()) {
    log_warning(alone);
  }
  if (!cuda && options.device == DeviceChoice::Auto && launch.local_rank == 0) {
    if (const auto lost = find_lost_gpus()) {
      log_warning("training on the CPU: " + lost->message);
    }
  }
}

void set_up_log(const Membership& membership) {
  set_log_rank(membership.world_size > 1 ? membership.rank : -1);
  set_log_level(membership.rank == 0 ? LogLevel::Info : LogLevel::Warning);
}

// Ranks capture steps without each other. With 1, the default, a captured call of NCCL may wait
// until all ranks capture it, and runs otherwise than the same call outside of captures. NCCL reads
// the variable once. Call it before threads start.
void keep_captures_apart() {
  setenv("NCCL_GRAPH_REGISTER", "0", /*overwrite=*/0);
}

void find_rank_0(const ContextOptions& options, const EnvironmentLookup& environment, int attempt,
                 Meeting& meeting) {
  if (meeting.membership.world_size > 1) {
    meeting.rendezvous = make_job_rendezvous(meeting.launch, meeting.membership, environment,
                                             options.control_plane, meeting.mpi, attempt);
  }
}

}  // namespace

Meeting first_meeting(const ContextOptions& options) {
  const int attempt = next_attempt();
  const auto environment = process_environment();
  Meeting meeting;
  auto& launch = meeting.launch;
  launch = detect_launch_environment(options.launch, environment);
  const bool cuda = meets_on_cuda(options, launch.world_size);
  if (launch.world_size > 1 && !cuda && !launch.use_mpi) {
    // Before any rank waits for another.
    refuse_without_mpi(launch, MpiRuntime::is_built_in());
  }
  if (launch.use_mpi && launch.world_size != 1 && (!cuda || MpiRuntime::is_built_in())) {
    meeting.mpi = start_mpi(launch, environment, options.control_plane.rendezvous_timeout);
  }
  if (launch.world_size == 0) {
    throw SettingsError(
        "PMIX_RANK is set without the number of ranks, which only MPI knows, and this build has no "
        "MPI; fix: start with torchrun or Slurm's srun, or build with MPI");
  }
  meeting.membership = launch.membership();
  set_up_log(meeting.membership);
  warn_of_unused_resources(options, launch, environment, cuda);
  find_rank_0(options, environment, attempt, meeting);
  if (cuda) {
    keep_captures_apart();
  }
  return meeting;
}

Meeting next_meeting(const ContextOptions& options, const Meeting& last,
                     const std::vector<int>& staying) {
  const int attempt = next_attempt();
  Meeting meeting;
  meeting.launch = last.launch;
  meeting.membership = next_generation(last.membership, staying);
  meeting.device = last.device;
  if (last.mpi != nullptr) {
    meeting.mpi = last.mpi->meet_again(staying, options.control_plane.rendezvous_timeout);
  }
  set_up_log(meeting.membership);
  find_rank_0(options, process_environment(), attempt, meeting);
  return meeting;
}

Membership next_generation(const Membership& last, const std::vector<int>& staying) {
  const auto self = std::find(staying.begin(), staying.end(), last.rank);
  DDP_CHECK(self != staying.end(), "rank ", last.rank, " of generation ", last.generation,
            " does not stay");
  Membership next{.generation = last.generation + 1,
                  .rank = static_cast<int>(self - staying.begin()),
                  .world_size = static_cast<int>(staying.size())};
  for (const int rank : staying) {
    next.hosts.push_back(last.hosts.at(static_cast<std::size_t>(rank)));
  }
  return next;
}

// mpirun sets local ranks but no node information.
void place_on_host(const ContextOptions& options, const Membership& membership,
                   LaunchEnvironment& launch) {
  const bool is_first = membership.generation == 0;
  const bool is_known =
      is_first && (launch.source == LaunchSource::OpenMpi || launch.source == LaunchSource::Slurm ||
                   launch.local_world_size > 1 || options.launch.local_rank.has_value());
  if (is_first &&
      (membership.world_size == 1 || (is_known && launch.source != LaunchSource::OpenMpi))) {
    return;
  }
  const auto place = count_local_place(membership.hosts, membership.rank);
  if (!is_known) {
    launch.local_rank = place.local_rank;
    launch.local_world_size = place.local_world_size;
  }
  launch.node_rank = place.node_rank;
  launch.num_nodes = place.num_nodes;
}

at::Device choose_device(const ContextOptions& options, const Meeting& meeting,
                         ControlPlane& control_plane) {
  const auto& launch = meeting.launch;
  DeviceReport report{.host = host_name()};
  at::Device device = meeting.device.value_or(at::Device(at::kCPU));
  try {
    if (uses_cuda(options)) {
      if (!meeting.device) {
        const int index = choose_gpu(launch.local_rank, launch.local_world_size,
                                     visible_gpus(options), report.host);
        device = at::Device(at::kCUDA, static_cast<at::DeviceIndex>(index));
      }
      identify_gpu(device.index(), report);
    } else if (!meeting.device) {
      share_cores(launch.local_world_size, meeting.membership.rank == 0);
    }
  } catch (const SettingsError& error) {
    report.problem = error.what();
  }
  // Compared before NCCL starts, which reports only "invalid usage" if two ranks share a GPU.
  check_devices(all_gather_messages(control_plane, report));
  return device;
}

}  // namespace ddp::detail
