// SPDX-License-Identifier: Apache-2.0
// This process's rank and place in the job, computed only from environment variables and arguments.
#pragma once

#include <string>

#include "ddp/core/membership.hpp"

namespace ddp {

/// In the order of precedence.
enum class LaunchSource { Arguments, Torchrun, OpenMpi, Slurm, Pmix, Single };
const char* to_string(LaunchSource source);  ///< for messages: "torchrun", "a Slurm step", …

namespace detail {
/// The way to a group of a part of the launched ranks, for messages.
inline constexpr const char* kTrainOnSome =
    "to train on some of the ranks, all ranks call Context::create() without launch arguments, "
    "then communicator()->split()";
}  // namespace detail

struct LaunchEnvironment {
  LaunchSource source = LaunchSource::Single;
  int rank = 0;
  int world_size = 1;  ///< 0 under PMIx alone: only MPI knows it
  int local_rank = 0;
  int local_world_size = 1;  ///< ranks on this node; 1 if the launcher does not say
  int node_rank = 0;         ///< mpirun: a guess until Context::create has asked all ranks
  int num_nodes = 1;
  bool use_mpi = false;     ///< the launcher supports MPI_Init (else it would abort the process)
  std::string job_id;       ///< Slurm's, else torchrun's id; empty if there is none
  std::string step_id;      ///< Slurm step id; empty outside Slurm steps
  int restart_count = 0;    ///< how often the job was restarted
  std::string master_addr;  ///< host of rank 0 if the environment names it, else empty
  int master_port = 0;      ///< 0 if the environment does not name it
  bool torchrun_store = false;  ///< torchrun itself listens at master_addr:master_port

  /// Of the first generation. Its hosts are known once the ranks have met.
  Membership membership() const { return {.rank = rank, .world_size = world_size}; }
};

}  // namespace ddp
