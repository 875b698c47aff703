// SPDX-License-Identifier: Apache-2.0
#include "core/launch/lone_process.hpp"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>

#include "support/catch.hpp"

namespace ddp {
namespace {

using Environment = std::map<std::string, std::string>;

EnvironmentLookup lookup(const Environment& environment) {
  return [environment](const std::string& name) -> std::optional<std::string> {
    const auto found = environment.find(name);
    return found == environment.end() ? std::nullopt : std::optional(found->second);
  };
}

std::string warning(const Environment& environment, const LaunchArguments& arguments = {}) {
  const auto launch = detect_launch_environment(arguments, lookup(environment));
  return detail::describe_lone_process(launch, arguments, lookup(environment));
}

void says(const Environment& environment, std::initializer_list<const char*> parts) {
  const auto text = warning(environment);
  INFO(text);
  for (const char* part : parts) {
    INFO(part);
    CHECK(text.find(part) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("a program without srun in an allocation of several tasks is told") {
  says({{"SLURM_JOB_ID", "4"}, {"SLURM_NTASKS", "8"}},
       {"runs alone", "SLURM_NTASKS=8", "8 tasks", "`srun …`", "`srun --mpi=pmix …`",
        "`srun -n 1 …` if one process is meant"});
  // The batch script has a rank, but is no task.
  says({{"SLURM_JOB_ID", "4"}, {"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}}, {"SLURM_NTASKS=8"});
  says({{"SLURM_JOB_ID", "4"}, {"SLURM_TASKS_PER_NODE", "4(x2)"}}, {"SLURM_TASKS_PER_NODE=4(x2)"});
  says({{"SLURM_JOB_ID", "4"}, {"SLURM_JOB_NUM_NODES", "2"}}, {"SLURM_JOB_NUM_NODES=2", "2 tasks"});
  says({{"LSB_JOBID", "4"}, {"LSB_DJOB_NUMPROC", "16"}}, {"LSB_DJOB_NUMPROC=16", "mpirun -n 16 …"});
  says({{"PBS_JOBID", "4"}, {"PBS_NP", "6"}}, {"PBS_NP=6", "mpirun -n 6 …"});
}

TEST_CASE("PBS lists its slots in a file") {
  const auto path =
      std::filesystem::temp_directory_path() / ("ddp_nodefile_" + std::to_string(getpid()));
  std::ofstream(path) << "node1\nnode1\nnode2\n";
  const Environment job{{"PBS_JOBID", "4"}, {"PBS_NODEFILE", path.string()}};
  const auto text = warning(job);
  std::ofstream(path) << "node1\n";
  const auto one_slot = warning(job);
  std::filesystem::remove(path);
  INFO(text);
  CHECK(text.find("mpirun -n 3 …") != std::string::npos);
  CHECK(one_slot.empty());
}

TEST_CASE("a missing mpirun is told with the name of the command") {
  const auto folder =
      std::filesystem::temp_directory_path() / ("ddp_path_" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  Environment job{{"PBS_JOBID", "4"}, {"PBS_NP", "6"}, {"PATH", "/nonexistent:" + folder.string()}};
  const auto without = warning(job);
  std::ofstream(folder / "mpirun") << "#!/bin/sh\n";
  std::filesystem::permissions(folder / "mpirun", std::filesystem::perms::owner_all);
  const auto with = warning(job);
  std::filesystem::remove_all(folder);
  INFO(without);
  CHECK(without.find("PATH has no mpirun") != std::string::npos);
  CHECK(without.find("source .venv/bin/activate") != std::string::npos);
  CHECK(with.find("mpirun -n 6") != std::string::npos);
  CHECK(with.find("PATH has no mpirun") == std::string::npos);
}

TEST_CASE("no warning where one process is meant or a launcher started it") {
  const Environment allocation{{"SLURM_JOB_ID", "4"}, {"SLURM_NTASKS", "8"}};
  CHECK(warning({}).empty());
  CHECK(warning({{"SLURM_NTASKS", "8"}}).empty());  // left over, without a job
  CHECK(warning({{"SLURM_JOB_ID", "4"}, {"SLURM_NTASKS", "1"}, {"SLURM_JOB_NUM_NODES", "1"}})
            .empty());
  CHECK(warning({{"LSB_JOBID", "4"}, {"LSB_DJOB_NUMPROC", "1"}}).empty());
  CHECK(warning(allocation, {.world_size = 1}).empty());
  Environment torchrun = allocation;
  torchrun.insert({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  CHECK(warning(torchrun).empty());
  // srun -n 1 in the allocation.
  CHECK(warning({{"SLURM_JOB_ID", "4"},
                 {"SLURM_NTASKS", "1"},
                 {"SLURM_PROCID", "0"},
                 {"SLURM_STEP_ID", "2"},
                 {"SLURM_STEP_NUM_TASKS", "1"},
                 {"SLURM_JOB_NUM_NODES", "2"}})
            .empty());
}

}  // namespace ddp
