// SPDX-License-Identifier: Apache-2.0
// Checks that a cluster is ready for training.
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

#include "ddp/comm/context.hpp"
#include "ddp/core/error.hpp"
#include "ddp/train/command_line.hpp"

namespace {

constexpr const char* kUsage = R"(usage: cluster_check [device=auto|cpu|cuda]

Checks that a cluster is ready for training. All ranks reduce one tensor with a known sum, then rank
0 prints every rank's node and device. Exit code 0 means success.

  srun --mpi=pmix build/examples/cluster_check
  mpirun -n 4 build/examples/cluster_check
  torchrun --no-python --nproc-per-node=8 build/examples/cluster_check device=cuda

--version prints the versions of libddp and of the libraries it uses.
)";

std::string describe(const ddp::Context& context) {
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  std::ostringstream line;
  line << "rank " << context.rank() << " of " << context.world_size() << ": node "
       << context.node_rank() << " (" << host << "), local rank " << context.local_rank() << " of "
       << context.local_world_size() << ", device " << context.device() << ", communicator "
       << context.communicator()->backend() << ", started by " << context.launcher();
  return line.str();
}

/// Sums (rank + 1) over all ranks in a tensor of `num_elements`, checks the result and returns the
/// milliseconds.
double check_all_reduce(const ddp::Context& context, int64_t num_elements) {
  const auto communicator = context.communicator();
  auto tensor = torch::full({num_elements}, static_cast<float>(context.rank() + 1),
                            torch::TensorOptions().device(context.device()));
  communicator->barrier();
  const auto begin = std::chrono::steady_clock::now();
  communicator->all_reduce(tensor)->wait_host();
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - begin;
  const auto n = static_cast<double>(context.world_size());
  const double expected = n * (n + 1) / 2;
  if (!tensor.eq(expected).all().item<bool>()) {
    throw ddp::MismatchError(ddp::concat("all_reduce gave ", tensor[0].item<float>(), " on rank ",
                                         context.rank(), ", expected ", expected));
  }
  return elapsed.count();
}

int check(const ddp::ContextOptions& options) {
  auto context = ddp::Context::create(options);
  const auto lines = context.control_plane().all_gather(describe(context));
  check_all_reduce(context, 1024);  // opens connections
  const double ms = check_all_reduce(context, 8 << 20);
  if (context.is_main()) {
    for (const auto& line : lines) {
      std::cout << line << '\n';
    }
    std::cout << "all_reduce of 32 MiB: " << ms << " ms, the sum is correct on every rank\n"
              << "all checks passed" << std::endl;
  }
  context.close();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (ddp::answer_command_line(argc, argv, kUsage)) {
    return 0;
  }
  try {
    ddp::ContextOptions options;
    for (int i = 1; i < argc; ++i) {
      const std::string argument = argv[i];
      const std::map<std::string, ddp::DeviceChoice> known = {
          {"device=auto", ddp::DeviceChoice::Auto},
          {"device=cpu", ddp::DeviceChoice::Cpu},
          {"device=cuda", ddp::DeviceChoice::Cuda}};
      if (!known.contains(argument)) {
        throw ddp::SettingsError("cluster_check: unknown argument " + argument +
                                 "; there is device=auto|cpu|cuda");
      }
      options.device = known.at(argument);
    }
    return check(options);
  } catch (const ddp::Error& error) {
    std::cerr << error.what() << '\n';
    return static_cast<int>(error.exit_code());
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
