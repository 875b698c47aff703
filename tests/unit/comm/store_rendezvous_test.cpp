// SPDX-License-Identifier: Apache-2.0
// Contents of torchrun's store, which every process on the network can read and write.
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/job/job_rendezvous.hpp"
#include "core/control/control_leaf.hpp"
#include "support/catch.hpp"
#include "support/stderr_of.hpp"
#include "unit/core/plane_ranks.hpp"

namespace ddp::test {
namespace {

const std::string kSecret = "a secret of the test, long enough";

// Plays torchrun: creates a store and sets the ranks' variables.
class TorchrunJob {
 public:
  explicit TorchrunJob(std::map<std::string, std::string> environment = {})
      : environment_(std::move(environment)), store_("127.0.0.1", server_options()) {}

  LaunchEnvironment launch(int rank, int num_nodes = 1) const {
    auto launch = launch_of(rank, 2);
    launch.source = LaunchSource::Torchrun;
    launch.torchrun_store = true;
    launch.master_addr = "127.0.0.1";
    launch.master_port = store_.getPort();
    launch.num_nodes = num_nodes;
    launch.local_world_size = 2 / num_nodes;
    return launch;
  }
  std::shared_ptr<detail::Rendezvous> rendezvous(int rank, const ControlPlaneOptions& options = {},
                                                 int num_nodes = 1, int context = 0) const {
    const EnvironmentLookup lookup = [this](const std::string& name) {
      const auto found = environment_.find(name);
      return found == environment_.end() ? std::nullopt : std::optional(found->second);
    };
    const auto given = launch(rank, num_nodes);
    return detail::make_job_rendezvous(given, given.membership(), lookup, options, nullptr,
                                       context);
  }
  std::function<void()> rank(int rank, ControlPlaneOptions options = fast_options()) const {
    return [this, rank, options] {
      const auto plane =
          detail::create_control_plane(launch(rank), rendezvous(rank, options), options);
      plane->barrier();
      plane->close();
    };
  }
  std::string shown() {
    const auto bytes = store_.get(key());
    return {bytes.begin(), bytes.end()};
  }
  void show(const std::string& value) {
    store_.set(key(), std::vector<uint8_t>(value.begin(), value.end()));
  }

 private:
  static c10d::TCPStoreOptions server_options() {
    c10d::TCPStoreOptions options;
    options.port = 0;
    options.isServer = true;
    options.waitWorkers = false;
    options.timeout = 5s;
    return options;
  }
  std::string key() const { return detail::store_key(launch(0)); }

  std::map<std::string, std::string> environment_;
  c10d::TCPStore store_;
};

// True if rank 0 admits an intruder as rank 1 with any word in `shown` as secret.
bool is_admitted(const std::string& shown) {
  std::istringstream words(shown);
  std::string host, word;
  int port = 0;
  words >> host >> port;
  for (; words >> word;) {
    try {
      detail::Hello hello;
      hello.rank = 1;
      hello.world_size = 2;
      detail::join_hub(host, port, word, hello, Clock::now() + 2s);
      return true;  // rank 0 has the same secret, even if it refuses the rank
    } catch (const std::runtime_error&) {
    }
  }
  return false;
}

void require_all_met(const std::vector<RankEnd>& ends) {
  for (const auto& end : ends) {
    INFO(end.error);
    REQUIRE(end.exit_code == 0);
    REQUIRE(end.error.empty());
  }
}

TEST_CASE("torchrun: on one host the store shows no secret", "[context]") {
  TorchrunJob job;
  const auto stranger = [&] {
    const auto shown = job.shown();
    const auto file = "/tmp/.ddp_rendezvous." + shown;
    struct stat info {};
    const bool is_private =
        stat(file.c_str(), &info) == 0 && (info.st_mode & 07777) == 0600 && info.st_uid == getuid();
    const bool admitted = is_admitted(shown);
    job.rank(1)();
    if (admitted || !is_private || std::filesystem::exists(file)) {
      throw std::runtime_error(admitted ? "admitted" : is_private ? "left behind" : "not private");
    }
  };
  require_all_met(run_threads({job.rank(0), stranger}));
}

TEST_CASE("torchrun: with DDP_SECRET the store shows no secret", "[context]") {
  TorchrunJob job({{"DDP_SECRET", kSecret}});
  const auto stranger = [&] {
    const bool admitted = is_admitted(job.shown());
    job.rank(1)();
    if (admitted) {
      throw std::runtime_error("admitted");
    }
  };
  require_all_met(run_threads({job.rank(0), stranger}));
}

// Rank 0 of one job listens on the other job's former port, and both jobs share DDP_SECRET.
TEST_CASE("torchrun: two jobs with one port and one secret do not mix", "[context]") {
  TorchrunJob one({{"DDP_SECRET", kSecret}});
  TorchrunJob other({{"DDP_SECRET", kSecret}});
  auto options = fast_options();
  options.rendezvous_timeout = 1s;
  const auto of_other_job = [&] {
    std::istringstream words(one.shown());
    std::string host, port;
    words >> host >> port;
    other.rendezvous(0)->exchange(0, host + " " + port, 1s);
    const auto end = end_of(other.rank(1, options));
    one.rank(1)();
    throw std::runtime_error(end.error);
  };
  const auto ends = run_threads({one.rank(0), of_other_job});
  INFO(ends[0].error);
  REQUIRE(ends[0].error.empty());
  REQUIRE_THAT(ends[1].error, Catch::Contains("rank 0 refused the connection"));
}

TEST_CASE("torchrun: what a stranger writes into the store is not believed", "[context]") {
  const detail::Listener trap = *detail::listen_tcp("127.0.0.1", 0);
  const std::string bait = "127.0.0.1 " + std::to_string(trap.port) + " ";
  const std::string planted = "/tmp/.ddp_rendezvous." + std::string(64, 'e');
  std::ofstream(planted) << bait << "secret";
  std::filesystem::permissions(planted, std::filesystem::perms(0644));
  for (const bool with_secret : {false, true}) {
    TorchrunJob job(with_secret ? std::map<std::string, std::string>{{"DDP_SECRET", kSecret}}
                                : std::map<std::string, std::string>{});
    for (const auto& value :
         {bait + "secret", std::string(64, 'e'), std::string("../../etc/passwd")}) {
      job.show(value);
      const auto rendezvous = job.rendezvous(1);
      INFO(value);
      const auto end = end_of([&] { rendezvous->exchange(1, {}, 100ms); });
      REQUIRE(end.exit_code == static_cast<int>(ExitCode::PeerLost));
    }
  }
  std::filesystem::remove(planted);
}

TEST_CASE("torchrun: contexts that live at the same time have their own contact", "[context]") {
  for (const bool with_secret : {false, true}) {
    const TorchrunJob job(with_secret ? std::map<std::string, std::string>{{"DDP_SECRET", kSecret}}
                                      : std::map<std::string, std::string>{});
    const auto first = job.rendezvous(0);
    first->exchange(0, "127.0.0.1 1", 1s);
    REQUIRE_THAT(job.rendezvous(1)->exchange(1, {}, 1s), Catch::StartsWith("127.0.0.1 1"));
    const auto of_second = job.rendezvous(1, {}, 1, /*context=*/1);
    REQUIRE(end_of([&] { of_second->exchange(1, {}, 100ms); }).exit_code ==
            static_cast<int>(ExitCode::PeerLost));
    const auto second = job.rendezvous(0, {}, 1, /*context=*/1);
    second->exchange(0, "127.0.0.1 2", 1s);
    REQUIRE_THAT(of_second->exchange(1, {}, 1s), Catch::StartsWith("127.0.0.1 2"));
  }
}

TEST_CASE("Slurm: contexts that live at the same time have their own file", "[context]") {
  char folder[] = "/tmp/ddp_contexts_XXXXXX";
  REQUIRE(mkdtemp(folder) != nullptr);
  ControlPlaneOptions options;
  options.rendezvous_folder = folder;
  options.bind_address = "127.0.0.1";
  const auto rendezvous = [&](int rank, int context) {
    auto launch = launch_of(rank, 2);
    launch.source = LaunchSource::Slurm;
    launch.job_id = "7";
    const EnvironmentLookup nothing = [](const std::string&) { return std::nullopt; };
    return detail::make_job_rendezvous(launch, launch.membership(), nothing, options, nullptr,
                                       context);
  };
  {
    const auto first = rendezvous(0, 0);
    first->exchange(0, "127.0.0.1 1 secret", 1s);
    REQUIRE(rendezvous(1, 0)->exchange(1, {}, 1s) == "127.0.0.1 1 secret");
    REQUIRE(end_of([&] { rendezvous(1, 1)->exchange(1, {}, 100ms); }).exit_code ==
            static_cast<int>(ExitCode::PeerLost));
  }
  std::filesystem::remove_all(folder);
}

TEST_CASE("torchrun: a secret that is open to the network is told once", "[context]") {
  TorchrunJob job;
  const std::string warning = "the job's secret travels through torchrun's store";
  ControlPlaneOptions options;
  options.bind_address = "127.0.0.1";
  const auto told = [&](const TorchrunJob& which, int rank) {
    return testing::stderr_of([&] { which.rendezvous(rank, options, 2); });
  };
  const auto text = told(job, 0);
  REQUIRE(testing::num_found(text, warning) == 1);
  REQUIRE_THAT(text, Catch::Contains("set DDP_SECRET to the same random text"));
  REQUIRE(told(job, 1).empty());
  REQUIRE(told(TorchrunJob({{"DDP_SECRET", kSecret}}), 0).empty());
  options.rendezvous_folder = "/tmp";
  REQUIRE(told(job, 0).empty());
}

}  // namespace
}  // namespace ddp::test
