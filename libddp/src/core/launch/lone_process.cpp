// SPDX-License-Identifier: Apache-2.0
#include "core/launch/lone_process.hpp"

#include <unistd.h>

#include <algorithm>
#include <sstream>

#include "core/files/file_ops.hpp"
#include "core/settings/parse_number.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

constexpr std::size_t kMaxNodeFileBytes = 1 << 20;

// A variable of the scheduler, and the number of tasks that it gives; 0: it gives none.
struct Tasks {
  std::string origin{};  // "SLURM_NTASKS=8"
  int count = 0;
};

// "4(x2)" of Slurm begins with a number too.
Tasks leading_number(const char* name, const EnvironmentLookup& environment) {
  const auto text = environment(name).value_or("");
  const auto digits = text.substr(0, text.find_first_not_of("0123456789"));
  return {concat(name, "=", text.substr(0, 80)), parse_number<int>(digits).value_or(0)};
}

// The first variable that gives several tasks.
Tasks first_of(std::initializer_list<const char*> names, const EnvironmentLookup& environment) {
  for (const char* name : names) {
    if (auto tasks = leading_number(name, environment); tasks.count > 1) {
      return tasks;
    }
  }
  return {};
}

// The file has one line for each slot.
Tasks pbs_slots(const EnvironmentLookup& environment) {
  const auto path = environment("PBS_NODEFILE").value_or("");
  std::string why;
  const auto text = path.empty() ? std::nullopt : read_start(path, kMaxNodeFileBytes, why);
  if (!text) {
    return first_of({"PBS_NP", "PBS_NUM_NODES"}, environment);
  }
  return {concat("PBS_NODEFILE=", path.substr(0, 200)),
          static_cast<int>(std::count(text->begin(), text->end(), '\n'))};
}

// Where mpirun is not found, its name alone is no help.
std::string mpirun(const std::string& count, const EnvironmentLookup& environment) {
  std::istringstream folders(environment("PATH").value_or(""));
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (!folder.empty() && access((folder + "/mpirun").c_str(), X_OK) == 0) {
      return concat("`mpirun -n ", count, " …`");
    }
  }
  return concat("`mpirun -n ", count,
                " …` (PATH has no mpirun: load the module of MPI, or run `source "
                ".venv/bin/activate` in libddp's folder)");
}

std::string describe(const Tasks& tasks, const std::string& start, const std::string& start_one) {
  return concat("this process runs alone, but ", tasks.origin, ": the job has room for ",
                tasks.count, " tasks, and no launcher started this process as one of them; fix: ",
                "start the program with ", start, ", or with ", start_one,
                " if one process is meant");
}

}  // namespace

std::string describe_lone_process(const LaunchEnvironment& launch, const LaunchArguments& arguments,
                                  const EnvironmentLookup& environment) {
  if (launch.source != LaunchSource::Single || arguments.world_size) {
    return {};
  }
  const auto is_set = [&](const char* name) { return !environment(name).value_or("").empty(); };
  Tasks tasks;
  if (is_set("SLURM_JOB_ID")) {
    tasks = first_of({"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE",
                      "SLURM_TASKS_PER_NODE", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"},
                     environment);
    return tasks.count > 1 ? describe(tasks,
                                      "`srun …` (ranks on CPU: `srun --mpi=pmix …` or " +
                                          mpirun(std::to_string(tasks.count), environment) + ")",
                                      "`srun -n 1 …`")
                           : "";
  }
  if (is_set("PBS_JOBID")) {
    tasks = pbs_slots(environment);
  } else if (is_set("LSB_JOBID")) {
    tasks = first_of({"LSB_DJOB_NUMPROC", "LSB_MAX_NUM_PROCESSORS"}, environment);
  }
  return tasks.count > 1 ? describe(tasks, mpirun(std::to_string(tasks.count), environment),
                                    mpirun("1", environment))
                         : "";
}

}  // namespace ddp::detail
