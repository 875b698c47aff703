// SPDX-License-Identifier: Apache-2.0
// Joining the control plane: missing, duplicate, frozen and vanished ranks, intruders, taken ports.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>

#include "core/control/wire/message_codec.hpp"
#include "core/launch/rendezvous.hpp"
#include "support/catch.hpp"
#include "unit/core/join_by_hand.hpp"

namespace ddp::test {
namespace {

using detail::FrameType;

constexpr int kPeerLost = static_cast<int>(ExitCode::PeerLost);
constexpr int kSettings = static_cast<int>(ExitCode::Settings);

int connect_raw(const Address& address) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(address.port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0 ? fd : (close(fd), -1);
}

struct Job {
  explicit Job(int size, ControlPlaneOptions with = fast_options())
      : world_size(size), options(with) {}

  std::function<void()> rank(int rank, std::function<void(ControlPlane&)> body = {}) const {
    return [this, rank, body] {
      const auto plane =
          detail::create_control_plane(launch_of(rank, world_size), rendezvous, options);
      if (body) {
        body(*plane);
      }
      plane->close();
    };
  }

  int world_size;
  ControlPlaneOptions options;
  std::shared_ptr<LocalRendezvous> rendezvous = std::make_shared<LocalRendezvous>();
};

TEST_CASE("rendezvous: a timeout names every missing rank on those that came",
          "[control_plane][locale]") {
  auto options = fast_options();
  options.rendezvous_timeout = 300ms;
  const Job job(5, options);
  const auto ends = run_threads({job.rank(0), job.rank(2), job.rank(3)});
  for (const auto& end : ends) {
    REQUIRE(end.exit_code == kPeerLost);
    REQUIRE_THAT(end.error, Catch::Contains("3 of 5 ranks joined within 300 ms; missing: 1, 4;"));
  }
}

TEST_CASE("rendezvous: without rank 0 the others name it", "[control_plane]") {
  auto options = fast_options();
  options.rendezvous_timeout = 200ms;
  const auto fixed = detail::make_fixed_rendezvous("127.0.0.1", 1, "secret");
  const auto ends =
      run_threads({[&] { detail::create_control_plane(launch_of(1, 2), fixed, options); }});
  REQUIRE(ends[0].exit_code == kPeerLost);
  REQUIRE_THAT(ends[0].error,
               Catch::Contains("missing: 0") && Catch::Contains("Connection refused"));
}

TEST_CASE("rendezvous: two processes with one rank are named on all ranks", "[control_plane]") {
  const Job job(4);
  const auto ends = run_threads({job.rank(0), job.rank(2), job.rank(2)});
  const auto own = ":" + std::to_string(getpid());
  for (const auto& end : ends) {
    REQUIRE(end.exit_code == kSettings);
    REQUIRE_THAT(end.error,
                 Catch::Contains("two processes claim rank 2: ") && Catch::Contains(own + " and "));
  }
}

TEST_CASE("rendezvous: two processes with rank 0 at one port are named on all ranks",
          "[control_plane]") {
  const int port = detail::listen_tcp("127.0.0.1", 0)->port;  // released immediately
  const auto fixed = detail::make_fixed_rendezvous("127.0.0.1", port, "secret");
  const auto rank = [&](int number) {
    return
        [&, number] { detail::create_control_plane(launch_of(number, 3), fixed, fast_options()); };
  };
  for (const auto& end : run_threads({rank(0), rank(0), rank(1)})) {
    REQUIRE(end.exit_code == kSettings);
    REQUIRE_THAT(end.error, Catch::Contains("two processes claim rank 0: "));
  }
}

TEST_CASE("rendezvous: ranks that disagree about the job's size are named", "[control_plane]") {
  const Job job(3);
  const auto ends =
      run_threads({job.rank(0), job.rank(1), [&] {
                     detail::create_control_plane(launch_of(2, 4), job.rendezvous, fast_options());
                   }});
  for (const auto& end : ends) {
    REQUIRE(end.exit_code == kSettings);
    REQUIRE_THAT(end.error,
                 Catch::Contains("has WORLD_SIZE 4, rank 0 (") && Catch::Contains("has 3"));
  }
}

TEST_CASE("rendezvous: a rank not below the job's size is refused", "[control_plane]") {
  const Job job(2);
  const auto ends =
      run_threads({job.rank(0), [&] {
                     detail::create_control_plane(launch_of(2, 2), job.rendezvous, fast_options());
                   }});
  REQUIRE(ends[0].exit_code == kSettings);
  REQUIRE_THAT(ends[1].error, Catch::Contains("is not below WORLD_SIZE 2"));
}

TEST_CASE("control plane: a vanished rank is named with its last step", "[control_plane]") {
  const Job job(3);
  Clock::time_point gone;
  std::atomic<int64_t> heard_after_ms{-1};
  const auto vanish = [&] {
    auto hub = join_by_hand(address_of(*job.rendezvous), launch_of(2, 3));
    hub.channel.queue(FrameType::Progress,
                      detail::encode_message(detail::Progress{41, "bucket 3"}));
    hub.channel.flush();
    std::this_thread::sleep_for(50ms);
    gone = Clock::now();
  };
  const auto wait = [&](ControlPlane& plane) {
    plane.add_failure_callback([&](const FailureCause&) {
      heard_after_ms = static_cast<int64_t>(seconds_since(gone) * 1000);
    });
    plane.barrier();
  };
  const auto ends = run_threads({job.rank(0, wait), job.rank(1, wait), vanish});
  for (int rank : {0, 1}) {
    const auto& end = ends[static_cast<std::size_t>(rank)];
    REQUIRE(end.exit_code == kPeerLost);
    REQUIRE_THAT(end.error, Catch::Contains("rank 2 (node9) failed at step 41 in bucket 3: its "
                                            "connection closed without a message"));
  }
  REQUIRE(heard_after_ms >= 0);
  REQUIRE(heard_after_ms < 500);
}

TEST_CASE("control plane: a frozen rank is lost after the missed heartbeats", "[control_plane]") {
  auto options = fast_options();
  options.heartbeat_interval = 100ms;
  options.heartbeat_misses = 3;
  const Job job(3, options);
  const auto freeze = [&] {
    const auto hub = join_by_hand(address_of(*job.rendezvous), launch_of(1, 3));
    std::this_thread::sleep_for(1500ms);
  };
  const auto start = Clock::now();
  const auto wait = [](ControlPlane& plane) { plane.barrier(); };
  double waited = 0;
  const auto ends = run_threads({[&] {
                                   const auto end = end_of(job.rank(0, wait));
                                   waited = seconds_since(start);
                                   throw PeerLostError(end.error);
                                 },
                                 freeze, job.rank(2, wait)});
  REQUIRE(waited > 0.25);
  REQUIRE(waited < 1.2);
  for (const int rank : {0, 2}) {
    REQUIRE_THAT(
        ends[static_cast<std::size_t>(rank)].error,
        Catch::Contains("rank 1 (node9)") && Catch::Contains("no sign of life for 300 ms"));
  }
}

TEST_CASE("control plane: an exception of its thread ends the job with a cause",
          "[control_plane]") {
  const Job job(3);
  const auto meet = [](ControlPlane& plane) {
    if (plane.rank() == 0) {
      plane.position_board()->add_probe(
          []() -> detail::GroupPosition { throw std::runtime_error("the probe broke"); });
    }
    plane.barrier();
  };
  const auto stay_away = [](ControlPlane& plane) {
    while (!plane.failed()) {
      std::this_thread::sleep_for(1ms);
    }
  };
  const auto ends = run_threads({job.rank(0, meet), job.rank(1, stay_away), job.rank(2, meet)});
  for (const int rank : {0, 2}) {
    INFO(ends[static_cast<std::size_t>(rank)].error);
    REQUIRE(ends[static_cast<std::size_t>(rank)].exit_code == 1);
    REQUIRE_THAT(ends[static_cast<std::size_t>(rank)].error,
                 Catch::Contains("the control plane's thread ended by an exception") &&
                     Catch::Contains("the probe broke"));
  }
}

TEST_CASE("control plane: idle ranks are kept alive by heartbeats", "[control_plane]") {
  auto options = fast_options();
  options.heartbeat_interval = 100ms;
  options.heartbeat_misses = 4;
  const auto ends = run_ranks(
      3,
      [](ControlPlane& plane) {
        std::this_thread::sleep_for(1200ms);
        plane.barrier();
      },
      options);
  for (const auto& end : ends) {
    REQUIRE(end.error.empty());
  }
}

TEST_CASE("control plane: strangers change nothing", "[control_plane]") {
  const Job job(3);
  std::vector<int> slow;
  const auto strangers = [&] {
    const auto address = address_of(*job.rendezvous);
    std::mt19937 random(7);
    for (int i = 0; i < 300; ++i) {
      const int fd = connect_raw(address);
      std::string bytes(i % 3 == 0 ? "GET / HTTP/1.1\r\n\r\n" : detail::kMagic);
      for (int k = 0; k < 2000 && i % 3 == 1; ++k) {
        bytes.push_back(static_cast<char>(random()));
      }
      send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (i % 3 == 2) {
        slow.push_back(fd);  // sends a partial frame and waits
      } else {
        close(fd);
      }
    }
    Address wrong = address;
    wrong.secret[0] = wrong.secret[0] == '0' ? '1' : '0';
    const auto refused =
        end_of([&] { join_by_hand(wrong, launch_of(1, 3), "node9", 4711, address.secret); });
    auto other_start = launch_of(1, 3);
    other_start.restart_count = 1;
    auto stale = join_by_hand(address, other_start);
    const auto cause = detail::decode_message<FailureCause>(stale.frames.at(0).payload);
    throw std::runtime_error(refused.error + " | " + cause.message);
  };
  const auto late = [&](int rank) {
    return [&, rank] {
      std::this_thread::sleep_for(300ms);
      job.rank(rank, [](ControlPlane& plane) { plane.barrier(); })();
    };
  };
  const auto meet = [](ControlPlane& plane) { plane.barrier(); };
  const auto ends = run_threads({job.rank(0, meet), strangers, late(1), late(2)});
  for (const int fd : slow) {
    close(fd);
  }
  REQUIRE_THAT(ends[1].error, Catch::Contains("rank 0 refused the connection") &&
                                  Catch::Contains("or to another start or generation of the job"));
  REQUIRE(slow.size() == 100);
  for (const int at : {0, 2, 3}) {
    INFO(ends[static_cast<std::size_t>(at)].error);
    REQUIRE(ends[static_cast<std::size_t>(at)].error.empty());
  }
}

TEST_CASE("control plane: who comes after all ranks joined is told, the job goes on",
          "[control_plane]") {
  const Job job(2);
  std::string told;
  const auto ends =
      run_threads({job.rank(0,
                            [&](ControlPlane& plane) {
                              plane.barrier();
                              plane.barrier();
                            }),
                   job.rank(1, [&](ControlPlane& plane) {
                     plane.barrier();
                     const auto late =
                         join_by_hand(address_of(*job.rendezvous), launch_of(1, 2), "node7", 99);
                     told = detail::decode_message<FailureCause>(late.frames.at(0).payload).message;
                     plane.barrier();
                   })});
  REQUIRE_THAT(told, Catch::Contains("two processes claim rank 1") && Catch::Contains("node7:99"));
  REQUIRE(ends[0].error.empty());
  REQUIRE(ends[1].error.empty());
}

TEST_CASE("rendezvous: a fixed port that is taken is a settings error", "[control_plane]") {
  const auto stranger = detail::listen_tcp("127.0.0.1", 0);
  const auto fixed = detail::make_fixed_rendezvous("127.0.0.1", stranger->port, "secret");
  const auto end =
      end_of([&] { detail::create_control_plane(launch_of(0, 2), fixed, fast_options()); });
  REQUIRE(end.exit_code == kSettings);
  REQUIRE_THAT(end.error,
               Catch::Contains("port " + std::to_string(stranger->port) + " of 127.0.0.1") &&
                   Catch::Contains("already in use"));
}

TEST_CASE("rendezvous: an address of another host is a settings error", "[control_plane]") {
  const auto fixed = detail::make_fixed_rendezvous("192.0.2.1", 4321, "secret");
  const auto end =
      end_of([&] { detail::create_control_plane(launch_of(0, 2), fixed, fast_options()); });
  REQUIRE(end.exit_code == kSettings);
  REQUIRE_THAT(end.error, Catch::Contains("'192.0.2.1' port 4321"));
  REQUIRE(end_of([] { detail::make_fixed_rendezvous("127.0.0.1", 1, ""); }).exit_code == kSettings);
}

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = std::filesystem::temp_directory_path() / "ddp_unit_XXXXXX";
    path_ = mkdtemp(name.data());
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST_CASE("rendezvous: ranks meet through a file only their user can read",
          "[control_plane][locale]") {
  const TemporaryFolder folder;
  const std::string file = folder.path() + "/.ddp_rendezvous.12.0.0";
  mode_t mode = 0;
  const auto rank = [&](int number) {
    return [&, number] {
      const auto plane = detail::create_control_plane(
          launch_of(number, 2), detail::make_file_rendezvous(folder.path(), "12.0.0", "127.0.0.1"),
          fast_options());
      struct stat info {};
      if (number == 1 && stat(file.c_str(), &info) == 0) {
        mode = info.st_mode & 0777;
      }
      plane->barrier();
      plane->close();
    };
  };
  // A file that another user could have written is not trusted.
  std::ofstream(file) << "127.0.0.1 1 planted";
  std::filesystem::permissions(file, std::filesystem::perms(0644));
  const auto reader = detail::make_file_rendezvous(folder.path(), "12.0.0", "127.0.0.1");
  REQUIRE(end_of([&] { reader->exchange(1, {}, 100ms); }).exit_code == kPeerLost);
  for (const auto& end : run_threads({rank(1), [&] {
                                        std::this_thread::sleep_for(200ms);
                                        rank(0)();
                                      }})) {
    REQUIRE(end.error.empty());
  }
  REQUIRE((mode == 0600 || mode == 0));  // 0: rank 0 has removed it already
  REQUIRE(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("rendezvous: the file stays away and the folder cannot be written", "[control_plane]") {
  const TemporaryFolder folder;
  const auto missing = detail::make_file_rendezvous(folder.path(), "1", "127.0.0.1");
  const auto end = end_of([&] { missing->exchange(1, {}, 100ms); });
  REQUIRE(end.exit_code == kPeerLost);
  REQUIRE_THAT(end.error, Catch::Contains(folder.path()));
  const auto nowhere = detail::make_file_rendezvous(folder.path() + "/none", "1", "127.0.0.1");
  REQUIRE(end_of([&] { nowhere->exchange(0, "contact", 100ms); }).exit_code == kSettings);
}

}  // namespace
}  // namespace ddp::test
