// SPDX-License-Identifier: Apache-2.0
// Who am I in the job: a pure function of the environment the launcher left.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace ddp {

enum class LaunchSource { Arguments, Torchrun, OpenMpi, Slurm, Pmix, Single };

/// "explicit arguments", "torchrun", "mpirun", "a Slurm step", "PMIx", "a single process".
const char* to_string(LaunchSource source);

/// What a program may say itself; a value given here that contradicts the launcher is an error.
struct LaunchArguments {
  std::optional<int> rank = {};
  std::optional<int> world_size = {};
  std::optional<int> local_rank = {};
  std::optional<int> local_world_size = {};
  std::optional<std::string> rendezvous = {};  ///< "host:port" of rank 0's control plane
};

struct LaunchEnvironment {
  LaunchSource source = LaunchSource::Single;
  int rank = 0;
  int world_size = 1;  ///< 0 under PMIx alone: only MPI knows it
  int local_rank = 0;
  int local_world_size = 1;  ///< ranks on this node; 1 where the launcher does not say
  int node_rank = 0;  ///< mpirun does not say: a guess until Context::create has asked all ranks
  int num_nodes = 1;
  bool use_mpi = false;         ///< MPI_Init works here (elsewhere it would abort the process)
  std::string job_id;           ///< Slurm's, else torchrun's id, empty where there is none
  std::string step_id;          ///< of a Slurm step, empty elsewhere
  int restart_count = 0;        ///< how often the job was started again
  std::string master_addr;      ///< host of rank 0 where the environment tells it, else empty
  int master_port = 0;          ///< 0 where the environment does not tell it
  bool torchrun_store = false;  ///< torchrun itself listens at master_addr:master_port
};

using EnvironmentLookup = std::function<std::optional<std::string>(const std::string& name)>;

/// The process's own environment.
EnvironmentLookup process_environment();

/// Explicit arguments (rank and world_size), else torchrun (RANK and WORLD_SIZE), else mpirun
/// (OMPI_COMM_WORLD_RANK), else a Slurm step, else PMIx, else a single process. Throws
/// SettingsError naming both sides where the chosen source contradicts itself or the arguments;
/// variables of other launchers are ignored. Arguments that agree with a launcher keep its source;
/// empty variables count as unset.
LaunchEnvironment detect_launch_environment(const LaunchArguments& arguments,
                                            const EnvironmentLookup& environment);

}  // namespace ddp
