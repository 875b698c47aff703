// SPDX-License-Identifier: Apache-2.0
#include "core/launch/launch_environment.hpp"

#include <map>
#include <string>
#include <vector>

#include "core/launch/detect_launch.hpp"
#include "ddp/core/error.hpp"
#include "support/catch.hpp"

namespace ddp {
namespace {

using Environment = std::map<std::string, std::string>;

LaunchEnvironment detect(const Environment& environment, const LaunchArguments& arguments = {}) {
  return detect_launch_environment(
      arguments, [&](const std::string& name) -> std::optional<std::string> {
        const auto found = environment.find(name);
        return found == environment.end() ? std::nullopt
                                          : std::optional<std::string>(found->second);
      });
}

Environment operator+(Environment left, const Environment& right) {
  for (const auto& [name, value] : right) {
    left[name] = value;
  }
  return left;
}

Environment without(Environment environment, const std::string& name) {
  environment.erase(name);
  return environment;
}

// A task's environment: srun inside sbatch, 2 nodes x 4 tasks, --mpi=pmix (Slurm 22.05).
const Environment kSlurmTask = {{"SLURM_PROCID", "5"},
                                {"SLURM_LOCALID", "1"},
                                {"SLURM_NODEID", "1"},
                                {"SLURM_NTASKS", "8"},
                                {"SLURM_NPROCS", "8"},
                                {"SLURM_NNODES", "2"},
                                {"SLURM_JOB_NUM_NODES", "2"},
                                {"SLURM_JOB_ID", "117"},
                                {"SLURM_JOBID", "117"},
                                {"SLURM_STEP_ID", "0"},
                                {"SLURM_STEPID", "0"},
                                {"SLURM_JOB_NODELIST", "node[1-2]"},
                                {"SLURM_STEP_NODELIST", "node[1-2]"},
                                {"SLURM_TASKS_PER_NODE", "4(x2)"},
                                {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"},
                                {"SLURM_NTASKS_PER_NODE", "4"},
                                {"SLURM_STEP_NUM_TASKS", "8"},
                                {"SLURM_STEP_NUM_NODES", "2"},
                                {"SLURM_GTIDS", "4,5,6,7"},
                                {"SLURM_MPI_TYPE", "pmix"},
                                {"PMIX_RANK", "5"},
                                {"PMIX_NAMESPACE", "slurm.pmix.117.0"}};

// The batch script of the same job, without srun.
const Environment kSlurmBatch = {{"SLURM_PROCID", "0"},
                                 {"SLURM_LOCALID", "0"},
                                 {"SLURM_NODEID", "0"},
                                 {"SLURM_NTASKS", "8"},
                                 {"SLURM_NNODES", "2"},
                                 {"SLURM_JOB_ID", "117"},
                                 {"SLURM_JOB_NODELIST", "node[1-2]"},
                                 {"SLURM_TASKS_PER_NODE", "4(x2)"}};

// mpirun -n 4, two ranks per node.
const Environment kOpenMpi = {
    {"OMPI_COMM_WORLD_RANK", "3"},       {"OMPI_COMM_WORLD_SIZE", "4"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
    {"OMPI_COMM_WORLD_NODE_RANK", "1"},  {"PMIX_RANK", "3"}};

// torchrun --nnodes 2 --nproc-per-node 2, second node.
const Environment kTorchrun = {{"RANK", "3"},
                               {"WORLD_SIZE", "4"},
                               {"LOCAL_RANK", "1"},
                               {"LOCAL_WORLD_SIZE", "2"},
                               {"GROUP_RANK", "1"},
                               {"GROUP_WORLD_SIZE", "2"},
                               {"MASTER_ADDR", "10.0.0.1"},
                               {"MASTER_PORT", "29500"},
                               {"TORCHELASTIC_RUN_ID", "exp7"},
                               {"TORCHELASTIC_RESTART_COUNT", "2"},
                               {"TORCHELASTIC_USE_AGENT_STORE", "True"}};

// Kubeflow's PyTorchJob: three pods with one process each, third pod.
const Environment kPyTorchJob = {{"RANK", "2"},
                                 {"WORLD_SIZE", "3"},
                                 {"MASTER_ADDR", "resnet-master-0"},
                                 {"MASTER_PORT", "23456"},
                                 {"PET_NNODES", "3"},
                                 {"PET_NODE_RANK", "2"},
                                 {"PET_NPROC_PER_NODE", "auto"}};

// Kubeflow's TrainJob: three pods, second pod. Its values are for torchrun alone.
const Environment kTrainJob = {{"PET_NNODES", "3"},
                               {"PET_NODE_RANK", "1"},
                               {"PET_NPROC_PER_NODE", "1"},
                               {"PET_MASTER_ADDR", "resnet-node-0-0.resnet"},
                               {"PET_MASTER_PORT", "29400"}};

// An indexed Job of Kubernetes: RANK comes from the pod's index, the rest from the manifest.
const Environment kIndexedJob = {{"JOB_COMPLETION_INDEX", "1"},
                                 {"RANK", "1"},
                                 {"WORLD_SIZE", "2"},
                                 {"MASTER_ADDR", "resnet-0.resnet"},
                                 {"MASTER_PORT", "29500"}};

struct Expected {
  std::string name;
  Environment environment;
  LaunchSource source;
  int rank, world_size, local_rank, local_world_size, node_rank, num_nodes;
  bool use_mpi;
};

void check(const Expected& row) {
  INFO(row.name);
  const LaunchEnvironment got = detect(row.environment);
  CHECK(std::string(to_string(got.source)) == to_string(row.source));
  CHECK(got.rank == row.rank);
  CHECK(got.world_size == row.world_size);
  CHECK(got.local_rank == row.local_rank);
  CHECK(got.local_world_size == row.local_world_size);
  CHECK(got.node_rank == row.node_rank);
  CHECK(got.num_nodes == row.num_nodes);
  CHECK(got.use_mpi == row.use_mpi);
}

}  // namespace

TEST_CASE("each launcher is recognised") {
  const std::vector<Expected> table = {
      {"alone", {}, LaunchSource::Single, 0, 1, 0, 1, 0, 1, false},
      {"empty variables are unset",
       {{"RANK", ""}, {"SLURM_PROCID", ""}, {"PMIX_RANK", ""}},
       LaunchSource::Single,
       0,
       1,
       0,
       1,
       0,
       1,
       false},
      {"srun --mpi=pmix", kSlurmTask, LaunchSource::Slurm, 5, 8, 1, 4, 1, 2, true},
      {"srun without PMIx", without(kSlurmTask, "PMIX_RANK"), LaunchSource::Slurm, 5, 8, 1, 4, 1, 2,
       false},
      {"srun, uneven nodes",
       kSlurmTask + Environment{{"SLURM_PROCID", "3"},
                                {"PMIX_RANK", "3"},
                                {"SLURM_LOCALID", "0"},
                                {"SLURM_NTASKS", "4"},
                                {"SLURM_STEP_NUM_TASKS", "4"},
                                {"SLURM_STEP_TASKS_PER_NODE", "3,1"}},
       LaunchSource::Slurm, 3, 4, 0, 1, 1, 2, true},
      {"the batch script is not a step", kSlurmBatch, LaunchSource::Single, 0, 1, 0, 1, 0, 1,
       false},
      {"the batch step by number", kSlurmBatch + Environment{{"SLURM_STEP_ID", "4294967291"}},
       LaunchSource::Single, 0, 1, 0, 1, 0, 1, false},
      {"the batch step by name", kSlurmBatch + Environment{{"SLURM_STEP_ID", "batch"}},
       LaunchSource::Single, 0, 1, 0, 1, 0, 1, false},
      {"salloc alone",
       {{"SLURM_JOB_ID", "4"}, {"SLURM_NTASKS", "8"}},
       LaunchSource::Single,
       0,
       1,
       0,
       1,
       0,
       1,
       false},
      {"mpirun", kOpenMpi, LaunchSource::OpenMpi, 3, 4, 1, 2, 1, 2, true},
      {"mpirun inside a job: the batch step's ids are not ours", kSlurmBatch + kOpenMpi,
       LaunchSource::OpenMpi, 3, 4, 1, 2, 1, 2, true},
      {"mpirun inside a job: orted's step is not ours",
       kSlurmTask + Environment{{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}} + kOpenMpi,
       LaunchSource::OpenMpi, 3, 4, 1, 2, 1, 2, true},
      {"torchrun", kTorchrun, LaunchSource::Torchrun, 3, 4, 1, 2, 1, 2, false},
      {"srun torchrun", kSlurmTask + kTorchrun, LaunchSource::Torchrun, 3, 4, 1, 2, 1, 2, false},
      {"mpirun torchrun", kOpenMpi + kTorchrun, LaunchSource::Torchrun, 3, 4, 1, 2, 1, 2, false},
      {"PyTorchJob", kPyTorchJob, LaunchSource::Torchrun, 2, 3, 0, 1, 0, 1, false},
      {"TrainJob", kTrainJob, LaunchSource::Torchrun, 1, 3, 0, 1, 1, 3, false},
      {"TrainJob with its own MASTER_ADDR",
       without(without(kTrainJob, "PET_MASTER_ADDR"), "PET_MASTER_PORT") +
           Environment{{"MASTER_ADDR", "resnet-master-0"}, {"MASTER_PORT", "23456"}},
       LaunchSource::Torchrun, 1, 3, 0, 1, 1, 3, false},
      {"TrainJob, processes by GPUs", kTrainJob + Environment{{"PET_NPROC_PER_NODE", "auto"}},
       LaunchSource::Torchrun, 1, 3, 0, 1, 1, 3, false},
      {"TrainJob with torchrun", kTrainJob + kTorchrun + Environment{{"PET_NPROC_PER_NODE", "2"}},
       LaunchSource::Torchrun, 3, 4, 1, 2, 1, 2, false},
      {"TrainJob with mpirun", kTrainJob + kOpenMpi, LaunchSource::OpenMpi, 3, 4, 1, 2, 1, 2, true},
      {"indexed Job", kIndexedJob, LaunchSource::Torchrun, 1, 2, 0, 1, 0, 1, false},
      {"WORLD_SIZE alone is nobody's", kOpenMpi + Environment{{"WORLD_SIZE", "9"}},
       LaunchSource::OpenMpi, 3, 4, 1, 2, 1, 2, true},
      {"WORLD_SIZE of a batch script is not the step's",
       kSlurmTask + Environment{{"WORLD_SIZE", "9"}}, LaunchSource::Slurm, 5, 8, 1, 4, 1, 2, true},
      {"WORLD_SIZE=1 alone", {{"WORLD_SIZE", "1"}}, LaunchSource::Single, 0, 1, 0, 1, 0, 1, false},
      {"PMIx alone", {{"PMIX_RANK", "2"}}, LaunchSource::Pmix, 2, 0, 0, 1, 0, 1, true},
      {"PMIx and WORLD_SIZE",
       {{"PMIX_RANK", "2"}, {"WORLD_SIZE", "4"}},
       LaunchSource::Pmix,
       2,
       0,
       0,
       1,
       0,
       1,
       true},
  };
  for (const Expected& row : table) {
    check(row);
  }
}

TEST_CASE("what else the launchers tell") {
  const auto slurm = detect(kSlurmTask + Environment{{"SLURM_RESTART_COUNT", "3"}});
  CHECK(slurm.job_id == "117");
  CHECK(slurm.step_id == "0");
  CHECK(slurm.restart_count == 3);
  CHECK(slurm.master_addr.empty());
  CHECK(slurm.master_port == 0);

  const auto torchrun = detect(kTorchrun);
  CHECK(torchrun.job_id == "exp7");
  CHECK(torchrun.restart_count == 2);
  CHECK(torchrun.master_addr == "10.0.0.1");
  CHECK(torchrun.master_port == 29500);
  CHECK(torchrun.torchrun_store);
  CHECK(torchrun.step_id.empty());
  CHECK_FALSE(detect(without(kTorchrun, "TORCHELASTIC_RUN_ID")).torchrun_store);
  CHECK(detect(kSlurmTask + kTorchrun).job_id == "117");
  CHECK(detect(kSlurmBatch).job_id == "117");
}

TEST_CASE("pods of Kubernetes find rank 0") {
  const auto find = [](const Environment& pod) {
    const auto got = detect(pod);
    CHECK_FALSE(got.torchrun_store);
    return got.master_addr + ":" + std::to_string(got.master_port);
  };
  CHECK(find(kPyTorchJob) == "resnet-master-0:23456");
  CHECK(find(kTrainJob) == "resnet-node-0-0.resnet:29400");
  CHECK(find(kIndexedJob) == "resnet-0.resnet:29500");
}

TEST_CASE("explicit arguments") {
  const auto got =
      detect({}, {.rank = 5, .world_size = 8, .local_world_size = 4, .rendezvous = "[::1]:29500"});
  CHECK(got.source == LaunchSource::Arguments);
  CHECK(got.rank == 5);
  CHECK(got.world_size == 8);
  CHECK(got.local_rank == 1);
  CHECK(got.node_rank == 1);
  CHECK(got.num_nodes == 2);
  CHECK(got.master_addr == "::1");
  CHECK(got.master_port == 29500);
  CHECK_FALSE(got.use_mpi);

  // Arguments that agree with the launcher keep the launcher's start method.
  const auto same = detect(kOpenMpi, {.rank = 3, .world_size = 4});
  CHECK(same.source == LaunchSource::OpenMpi);
  CHECK(same.use_mpi);
  // Arguments add values that the launcher does not give.
  CHECK(detect({{"PMIX_RANK", "2"}}, {.world_size = 4}).world_size == 4);
  CHECK(detect({}, {.world_size = 1}).source == LaunchSource::Single);
  // A world size as argument overrides WORLD_SIZE if RANK is not set.
  CHECK(detect({{"WORLD_SIZE", "4"}}, {.world_size = 1}).world_size == 1);
  CHECK(detect({{"WORLD_SIZE", "4"}}, {.rank = 1, .world_size = 2}).world_size == 2);
}

namespace {

// Checks that the message contains all `words`.
void expect_refused(const Environment& environment, const LaunchArguments& arguments,
                    const std::vector<std::string>& words) {
  INFO(words.front());
  std::string message;
  try {
    detect(environment, arguments);
  } catch (const SettingsError& error) {
    message = error.what();
  }
  for (const std::string& expected : words) {
    INFO(expected << " in: " << message);
    CHECK(message.find(expected) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("contradictions and bad numbers are refused with both sides") {
  const auto slurm = [](const Environment& change) { return kSlurmTask + change; };
  const auto torchrun = [](const Environment& change) { return kTorchrun + change; };
  expect_refused({{"RANK", "3"}}, {}, {"RANK=3", "WORLD_SIZE is not"});
  expect_refused(kOpenMpi + Environment{{"RANK", "3"}}, {}, {"RANK=3", "WORLD_SIZE is not"});
  expect_refused(torchrun({{"RANK", "4"}}), {}, {"RANK=4 contradicts WORLD_SIZE=4"});
  expect_refused(torchrun({{"RANK", "3x"}}), {}, {"RANK='3x'"});
  expect_refused(torchrun({{"RANK", "-1"}}), {}, {"RANK='-1'"});
  expect_refused(torchrun({{"RANK", " 1"}}), {}, {"RANK=' 1'"});
  expect_refused(torchrun({{"RANK", "99999999999999999999"}}), {}, {"RANK='99999999999999999999'"});
  expect_refused(torchrun({{"WORLD_SIZE", "0"}}), {}, {"WORLD_SIZE='0'", "from 1"});
  expect_refused(torchrun({{"LOCAL_RANK", "2"}}), {},
                 {"LOCAL_RANK=2 contradicts LOCAL_WORLD_SIZE=2"});
  expect_refused(torchrun({{"LOCAL_WORLD_SIZE", "5"}}), {},
                 {"LOCAL_WORLD_SIZE=5 contradicts WORLD_SIZE=4"});
  expect_refused(torchrun({{"GROUP_RANK", "2"}}), {},
                 {"GROUP_RANK=2 contradicts GROUP_WORLD_SIZE=2"});
  expect_refused(torchrun({{"MASTER_PORT", "65536"}}), {}, {"MASTER_PORT='65536'"});
  expect_refused(without(kTorchrun, "MASTER_ADDR"), {}, {"WORLD_SIZE=4", "MASTER_ADDR"});
  expect_refused(without(kOpenMpi, "OMPI_COMM_WORLD_SIZE"), {},
                 {"OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE is not"});
  expect_refused(kOpenMpi + Environment{{"OMPI_COMM_WORLD_RANK", "4"}}, {},
                 {"OMPI_COMM_WORLD_RANK=4 contradicts OMPI_COMM_WORLD_SIZE=4"});
  expect_refused(slurm({{"SLURM_PROCID", "8"}, {"PMIX_RANK", "8"}}), {},
                 {"SLURM_PROCID=8 contradicts SLURM_STEP_NUM_TASKS=8"});
  expect_refused(slurm({{"SLURM_NTASKS", "4"}}), {},
                 {"SLURM_STEP_NUM_TASKS=8 contradicts SLURM_NTASKS=4"});
  expect_refused(slurm({{"PMIX_RANK", "4"}}), {}, {"SLURM_PROCID=5 contradicts PMIX_RANK=4"});
  expect_refused(slurm({{"SLURM_LOCALID", "4"}}), {},
                 {"SLURM_LOCALID=4 contradicts SLURM_STEP_TASKS_PER_NODE=4(x2)"});
  expect_refused(slurm({{"SLURM_STEP_TASKS_PER_NODE", "4(x3)"}}), {},
                 {"SLURM_STEP_TASKS_PER_NODE=4(x3) contradicts SLURM_STEP_NUM_TASKS=8"});
  expect_refused(slurm({{"SLURM_STEP_TASKS_PER_NODE", "8"}}), {},
                 {"SLURM_STEP_TASKS_PER_NODE=8 contradicts SLURM_STEP_NUM_NODES=2"});
  expect_refused(slurm({{"SLURM_NODEID", "2"}}), {},
                 {"SLURM_NODEID=2 contradicts SLURM_STEP_NUM_NODES=2"});
  CHECK(detect(slurm({{"SLURM_STEP_NODELIST", "node[1-3"}})).rank == 5);  // nothing reads it
  expect_refused(kTorchrun, {.rank = 2},
                 {"argument rank=2 contradicts RANK=3", "fix: omit the argument",
                  "all ranks call Context::create()", "communicator()->split("});
  expect_refused(kOpenMpi, {.world_size = 8},
                 {"argument world_size=8 contradicts OMPI_COMM_WORLD_SIZE=4"});
  expect_refused({}, {.rank = 1}, {"argument rank=1", "world_size is not"});
  expect_refused({}, {.world_size = 2}, {"argument world_size=2", "rank is not"});
  expect_refused({}, {.rank = 2, .world_size = 2},
                 {"argument rank=2 contradicts argument world_size=2"});
  expect_refused({}, {.rank = -1, .world_size = 2}, {"rank=-1"});
  expect_refused({}, {.rendezvous = "host"}, {"rendezvous='host'", "host:port"});
  expect_refused({}, {.rendezvous = "host:0"}, {"rendezvous='host:0'"});
}

TEST_CASE("a pod's wrong variables are refused") {
  const Environment eight = {{"PET_NPROC_PER_NODE", "8"}};
  const std::vector<std::string> words = {"PET_NPROC_PER_NODE=8", "LOCAL_RANK is not set",
                                          "torchrun --no-python"};
  expect_refused(kTrainJob + eight, {}, words);
  expect_refused(kPyTorchJob + Environment{{"WORLD_SIZE", "24"}} + eight, {}, words);
  expect_refused(without(kTrainJob, "PET_NNODES"), {}, {"PET_NODE_RANK=1", "PET_NNODES is not"});
  expect_refused(kTrainJob + Environment{{"PET_NODE_RANK", "3"}}, {},
                 {"PET_NODE_RANK=3 contradicts PET_NNODES=3"});
  expect_refused(kTrainJob + Environment{{"PET_NNODES", "1:3"}}, {}, {"PET_NNODES='1:3'"});
  expect_refused(without(kTrainJob, "PET_MASTER_ADDR"), {},
                 {"PET_NNODES=3", "MASTER_ADDR or MASTER_PORT is not"});
  expect_refused(without(kTrainJob, "PET_NODE_RANK"), {},
                 {"PET_NNODES=3", "PET_NODE_RANK is not", "unset PET_NNODES"});
  expect_refused(without(kIndexedJob, "RANK"), {}, {"WORLD_SIZE=2", "RANK is not"});
}

TEST_CASE("ranks of an MPI whose variables are not read are refused") {
  const Environment mpich = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"PMI_FD", "7"}};
  expect_refused(mpich, {}, {"PMI_SIZE=2", "MPICH or Intel MPI", "mpirun of Open MPI"});
  REQUIRE(detect({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}).source == LaunchSource::Single);
  // srun sets them too.
  REQUIRE(detect(kOpenMpi + mpich).source == LaunchSource::OpenMpi);
  REQUIRE(detect(mpich, {.world_size = 1}).source == LaunchSource::Single);
}

TEST_CASE("half of a placement is refused") {
  // Otherwise each process would silently run alone, N times.
  expect_refused({{"WORLD_SIZE", "4"}}, {}, {"WORLD_SIZE=4", "RANK is not"});
  expect_refused({{"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}}, {}, {"WORLD_SIZE=4", "RANK is not"});
  expect_refused(kSlurmBatch + Environment{{"WORLD_SIZE", "8"}}, {},
                 {"WORLD_SIZE=8", "RANK is not", "srun"});
  const std::string nodes = "SLURM_STEP_NUM_NODES";
  const auto one_node = without(without(kSlurmTask, nodes), "SLURM_NNODES");
  expect_refused(one_node, {}, {"SLURM_NODEID=1 is set but SLURM_NNODES is not"});
  CHECK(detect(without(kSlurmTask, nodes)).num_nodes == 2);
  expect_refused(without(kSlurmTask, "SLURM_NODEID"), {},
                 {"SLURM_STEP_NUM_NODES=2 is set but SLURM_NODEID is not"});
  expect_refused(without(without(kSlurmTask, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_NTASKS_PER_NODE"),
                 {}, {"SLURM_LOCALID=1 is set but SLURM_STEP_TASKS_PER_NODE is not"});
  expect_refused(without(kOpenMpi, "OMPI_COMM_WORLD_LOCAL_SIZE"), {},
                 {"OMPI_COMM_WORLD_LOCAL_RANK=1 is set but OMPI_COMM_WORLD_LOCAL_SIZE is not"});
  expect_refused(without(kOpenMpi, "OMPI_COMM_WORLD_LOCAL_RANK"), {},
                 {"OMPI_COMM_WORLD_LOCAL_SIZE=2 is set but OMPI_COMM_WORLD_LOCAL_RANK is not"});
  expect_refused(without(kTorchrun, "GROUP_WORLD_SIZE"), {},
                 {"GROUP_RANK=1 is set but GROUP_WORLD_SIZE is not"});
  // Set by hand, with LOCAL_RANK alone: the ranks count the ranks on their host.
  const auto by_hand = detect({{"RANK", "3"},
                               {"WORLD_SIZE", "4"},
                               {"LOCAL_RANK", "1"},
                               {"MASTER_ADDR", "10.0.0.1"},
                               {"MASTER_PORT", "29500"}});
  CHECK(by_hand.local_rank == 1);
}

}  // namespace ddp
