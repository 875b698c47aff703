// SPDX-License-Identifier: Apache-2.0
// Ranks started by torchrun meet through its store; a control plane is all they make, so that no
// GPU and no MPI is needed.
#include <cstdio>

#include "comm/job_rendezvous.hpp"
#include "ddp/core/control_plane.hpp"

int main() {
  try {
    const auto environment = ddp::process_environment();
    const auto launch = ddp::detect_launch_environment({}, environment);
    ddp::ControlPlaneOptions options;
    options.rendezvous_timeout = std::chrono::seconds(20);
    const auto plane = ddp::ControlPlane::create(
        launch, ddp::detail::make_job_rendezvous(launch, environment, options, nullptr), options);
    std::string all;
    for (const auto& rank : plane->all_gather(std::to_string(plane->rank()))) {
      all += rank;
    }
    plane->close();
    if (launch.rank == 0) {
      std::printf("through %s: ranks %s\n", launch.torchrun_store ? "the store" : "an address",
                  all.c_str());
    }
    return 0;
  } catch (const ddp::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.exit_code());
  }
}
