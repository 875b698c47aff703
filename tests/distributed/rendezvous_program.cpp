// SPDX-License-Identifier: Apache-2.0
// Ranks that meet at MASTER_ADDR:MASTER_PORT and do nothing else; no LibTorch, no MPI.
//
//   rendezvous_program meet                 all come
//   rendezvous_program absent RANK          that rank never comes
//   rendezvous_program twice RANK CLAIMED   RANK says that it is CLAIMED
//   rendezvous_program taken                rank 0's port belongs to another program
//   rendezvous_program size RANK            RANK believes in one rank more
//
// Ends with the exit code of the error.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>

#include "core/rendezvous.hpp"
#include "core/tcp_socket.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/core/error.hpp"

namespace {

using namespace std::chrono_literals;

int run(const std::string& fault, int culprit, int claimed) {
  auto launch = ddp::detect_launch_environment({}, ddp::process_environment());
  ddp::ControlPlaneOptions options;
  options.rendezvous_timeout = 1500ms;
  std::optional<ddp::detail::Listener> stranger;
  if (fault == "taken" && launch.rank == 0) {
    stranger = ddp::detail::listen_tcp(launch.master_addr, launch.master_port);
  }
  if (launch.rank == culprit) {
    if (fault == "absent") {
      return 0;
    }
    launch.world_size += fault == "size" ? 1 : 0;
    if (fault == "twice") {
      launch.rank = claimed;
    }
  }
  const char* secret = std::getenv("DDP_SECRET");
  const auto rendezvous = ddp::detail::make_fixed_rendezvous(launch.master_addr, launch.master_port,
                                                             secret == nullptr ? "" : secret);
  const auto plane = ddp::ControlPlane::create(launch, rendezvous, options);
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
    return static_cast<int>(error.exit_code());
  }
}
