// SPDX-License-Identifier: Apache-2.0
// Ranks meet at MASTER_ADDR:MASTER_PORT and do nothing else; no LibTorch, no MPI.
//
//   rendezvous_program meet                 all ranks come
//   rendezvous_program absent RANK          RANK never comes
//   rendezvous_program twice RANK CLAIMED   RANK claims to be CLAIMED
//   rendezvous_program taken                rank 0's port belongs to another program
//   rendezvous_program size RANK            RANK assumes a world size larger by one
//   rendezvous_program other_job RANK       RANK belongs to another job
//   rendezvous_program exhausted            rank 0 has too few file descriptors
//   rendezvous_program raised               rank 0 has too few, but may raise its limit
//   rendezvous_program held                 RANK 1 holds 200 silent connections
//
// Exits with the exit code of the error.
#include <fcntl.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/control/wire/tcp_socket.hpp"
#include "core/launch/detect_launch.hpp"
#include "core/launch/rendezvous.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/core/error.hpp"

namespace {

using namespace std::chrono_literals;

// Leaves `count` file descriptors to this process. With `hard` it cannot raise the limit either.
void leave_descriptors(int count, bool hard) {
  int end = 0;  // one past the highest permitted descriptor
  for (int num_free = 0; num_free < count; ++end) {
    num_free += fcntl(end, F_GETFD) == -1 ? 1 : 0;
  }
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = static_cast<rlim_t>(end);
  limit.rlim_max = hard ? limit.rlim_cur : limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

std::vector<ddp::detail::UniqueFd> hold_connections(const ddp::LaunchEnvironment& launch,
                                                    std::size_t count) {
  std::vector<ddp::detail::UniqueFd> held;
  const auto deadline = std::chrono::steady_clock::now() + 1s;
  while (held.size() < count && std::chrono::steady_clock::now() < deadline) {
    std::string why;
    auto fd = ddp::detail::connect_tcp(launch.master_addr, launch.master_port, deadline, why);
    if (fd.valid()) {
      held.push_back(std::move(fd));
    } else {
      std::this_thread::sleep_for(10ms);  // rank 0 is not listening yet
    }
  }
  return held;
}

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

int run(const std::string& fault, int culprit, int claimed) {
  auto launch = ddp::detect_launch_environment({}, ddp::process_environment());
  ddp::ControlPlaneOptions options;
  const bool ends_well = fault == "held" || fault == "raised";
  options.rendezvous_timeout = ends_well ? 10s : 1500ms;
  std::optional<ddp::detail::Listener> stranger;
  if (fault == "taken" && launch.rank == 0) {
    stranger = ddp::detail::listen_tcp(launch.master_addr, launch.master_port);
  }
  if (launch.rank == 0 && (fault == "exhausted" || fault == "raised" || fault == "held")) {
    leave_descriptors(fault == "held" ? 64 : 3, fault != "raised");
  }
  std::vector<ddp::detail::UniqueFd> held;
  if (fault == "held" && launch.rank == 1) {
    held = hold_connections(launch, 200);
  }
  if (launch.rank == culprit) {
    if (fault == "absent") {
      return 0;
    }
    launch.world_size += fault == "size" ? 1 : 0;
    if (fault == "twice") {
      launch.rank = claimed;
    }
    if (fault == "other_job") {
      launch.job_id = "another";
    }
  }
  const char* secret = std::getenv("DDP_SECRET");
  const auto rendezvous = ddp::detail::make_fixed_rendezvous(launch.master_addr, launch.master_port,
                                                             secret == nullptr ? "" : secret);
  const auto plane = ddp::detail::create_control_plane(launch, rendezvous, options);
  plane->barrier();
  plane->close();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argv[1], argc > 2 ? std::atoi(argv[2]) : -1, argc > 3 ? std::atoi(argv[3]) : -1);
  } catch (const ddp::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::fprintf(stderr, "%s\n", cpu_seconds() < 0.5 ? "it slept meanwhile" : "it was busy");
    return static_cast<int>(error.exit_code());
  }
}
