// SPDX-License-Identifier: Apache-2.0
// Ranks started by torchrun meet through its store. They create only a control plane, which needs
// no GPU and no MPI. The last rank first plays an intruder: it reads the store and tries to join
// with its contents.
#include <chrono>
#include <cstdio>
#include <sstream>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/job/job_rendezvous.hpp"
#include "core/control/control_leaf.hpp"
#include "ddp/core/control_plane.hpp"

namespace {

// True if rank 0 accepts any word from the store as its secret.
bool stranger_is_admitted(const ddp::LaunchEnvironment& launch) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(launch.master_port);
  options.waitWorkers = false;
  c10d::TCPStore store(launch.master_addr, options);
  const auto bytes = store.get(ddp::detail::store_key(launch));
  std::istringstream words(std::string(bytes.begin(), bytes.end()));
  std::string host, secret;
  int port = 0;
  words >> host >> port >> secret;
  if (secret.empty()) {
    return false;
  }
  try {
    ddp::detail::Hello hello;
    hello.rank = static_cast<uint32_t>(launch.rank);
    hello.world_size = static_cast<uint32_t>(launch.world_size);
    ddp::detail::join_hub(host, port, secret, hello,
                          std::chrono::steady_clock::now() + std::chrono::seconds(3));
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

}  // namespace

int main() {
  try {
    const auto environment = ddp::process_environment();
    const auto launch = ddp::detect_launch_environment({}, environment);
    ddp::ControlPlaneOptions options;
    options.rendezvous_timeout = std::chrono::seconds(20);
    const bool admitted = launch.rank == launch.world_size - 1 && launch.torchrun_store &&
                          stranger_is_admitted(launch);
    const auto meet = [&](int context) {
      return ddp::detail::create_control_plane(
          launch,
          ddp::detail::make_job_rendezvous(launch, launch.membership(), environment, options,
                                           nullptr, context),
          options);
    };
    const auto plane = meet(0);
    const auto second = meet(1);  // like a second context of this process
    second->barrier();
    second->close();
    std::string all;
    for (const auto& rank : plane->all_gather(std::to_string(plane->rank()))) {
      all += rank;
    }
    const bool any_admitted = plane->agree_any(admitted);
    plane->close();
    if (launch.rank == 0) {
      std::printf("through %s: ranks %s, a stranger %s\n",
                  launch.torchrun_store ? "the store" : "an address", all.c_str(),
                  any_admitted ? "is admitted" : "learns nothing");
    }
    return 0;
  } catch (const ddp::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.exit_code());
  }
}
