// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/start_mpi.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <string>

#include "core/control/wire/tcp_socket.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

// PMIx gives the rank only. A process that reaches no PMIx server is rank 0 of 1 for MPI and would
// train alone.
void complete_from_mpi(const MpiRuntime& mpi, LaunchEnvironment& launch) {
  const auto& by_mpi = mpi.membership();
  const int expected_size = launch.world_size == 0 ? by_mpi.world_size : launch.world_size;
  if (by_mpi.rank != launch.rank || by_mpi.world_size != expected_size) {
    throw SettingsError(
        concat(to_string(launch.source), " set rank ", launch.rank,
               launch.world_size == 0 ? "" : concat(" of ", launch.world_size),
               " in the environment, but MPI started this process as rank ", by_mpi.rank, " of ",
               by_mpi.world_size,
               "; fix: start the ranks through the launcher of the MPI that libddp was ",
               "built with, or unset the variables of another launcher"));
  }
  launch.world_size = by_mpi.world_size;
}

// A PMIx server sets both variables. PMIX_RANK alone is left over or set by hand.
void require_pmix_server(const LaunchEnvironment& launch, const EnvironmentLookup& environment) {
  if (launch.source == LaunchSource::Pmix && launch.world_size == 0 &&
      environment("PMIX_NAMESPACE").value_or("").empty()) {
    throw SettingsError(concat("PMIX_RANK=", launch.rank,
                               " is set but PMIX_NAMESPACE is not, so no PMIx server started this "
                               "process; fix: start the ranks with srun --mpi=pmix, mpirun or "
                               "torchrun, or unset PMIX_RANK to run a single process"));
  }
}

// Records which processes reached MPI_Init, which returns on no rank before all have called it.
// Each process leaves an empty file in a folder of this job and host, which its launcher removes at
// the job's end. Without such a folder nothing is recorded.
class StartedProcesses {
 public:
  StartedProcesses(const LaunchEnvironment& launch, const EnvironmentLookup& environment)
      : launch_(launch) {
    // Set by Open MPI, and by Slurm with PMIx. One launcher may run several jobs, one namespace
    // each.
    const auto folder = environment("PMIX_SERVER_TMPDIR").value_or("");
    const auto name = environment("PMIX_NAMESPACE").value_or("");
    if (folder.empty() || name.empty() || name.find('/') != std::string::npos ||
        launch.local_world_size <= 1) {
      return;
    }
    prefix_ = concat(folder, "/ddp_start_", name, "_");
    const UniqueFd fd(open(concat(prefix_, launch.local_rank).c_str(),
                           O_CREAT | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!fd.valid()) {
      prefix_.clear();
    }
  }

  // "; missing: rank 1, 3" if the whole job is on this host, else the missing ranks of this host.
  // Empty if nothing is recorded.
  std::string describe_missing() const {
    if (prefix_.empty()) {
      return {};
    }
    const bool one_host = launch_.local_world_size == launch_.world_size;
    std::string missing;
    for (int rank = 0; rank < launch_.local_world_size; ++rank) {
      if (access(concat(prefix_, rank).c_str(), F_OK) != 0) {
        missing += concat(missing.empty() ? "" : ", ", rank);
      }
    }
    if (missing.empty()) {
      return one_host ? "; every rank has begun it"
                      : concat("; every rank of ", host_name(), " has begun it");
    }
    return one_host ? "; missing: rank " + missing
                    : concat("; missing of ", host_name(), ": local rank ", missing);
  }

 private:
  const LaunchEnvironment& launch_;
  std::string prefix_;  // path prefix of the files; empty: nothing is recorded
};

}  // namespace

std::string describe_network(const LaunchEnvironment& launch,
                             const EnvironmentLookup& environment) {
  if (launch.world_size > 0 && launch.local_world_size >= launch.world_size) {
    return {};
  }
  std::string chosen;
  for (const char* name : {"OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude",
                           "OMPI_MCA_oob_tcp_if_include", "UCX_NET_DEVICES"}) {
    if (const auto value = environment(name); value && !value->empty()) {
      chosen += concat(", ", name, "=", value->substr(0, 80));
    }
  }
  return concat(
      "; if every rank of every node has begun it, the nodes do not reach each other over ",
      "MPI's network: ", host_name(), " has the interfaces ", describe_interfaces(), chosen,
      "; fix: export OMPI_MCA_btl_tcp_if_include and OMPI_MCA_oob_tcp_if_include "
      "with the interface or subnet that all nodes share (10.0.0.0/16), and open its "
      "ports between the nodes");
}

std::shared_ptr<MpiRuntime> start_mpi(LaunchEnvironment& launch,
                                      const EnvironmentLookup& environment,
                                      std::chrono::milliseconds timeout) {
  require_pmix_server(launch, environment);
  const StartedProcesses started(launch, environment);
  try {
    auto mpi = MpiRuntime::create(timeout);
    complete_from_mpi(*mpi, launch);
    return mpi;
  } catch (const PeerLostError& error) {
    throw PeerLostError(error.what() + started.describe_missing() +
                        describe_network(launch, environment));
  }
}

}  // namespace ddp::detail
