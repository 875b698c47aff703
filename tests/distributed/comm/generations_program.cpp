// SPDX-License-Identifier: Apache-2.0
// Ranks of one job that meet again, fewer each time, and go on training:
//
//   generations_program train LEAVER…   LEAVER is a rank of the generation that it leaves
//   generations_program fail LEAVER CULPRIT   CULPRIT is a rank of generation 1, in which it fails
//
// Every gradient is compared with its closed form. A rank that left prints "left" at once. Exits
// with the exit code of the thrown error, or with the policy's after a failure of the ranks.
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/job/context_handle.hpp"
#include "core/control/failure/failure_cause.hpp"
#include "core/control/failure/failure_watch.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/core/error.hpp"
#include "ddp/data/distributed_sampler.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"

namespace {

using namespace std::chrono_literals;

// Not divisible by the world sizes, so parts of sharded optimizers hold padding.
constexpr int64_t kFeatures = 7;
constexpr double kLr = 0.125;

void require(bool condition, const std::string& what) {
  if (!condition) {
    throw std::runtime_error(what);
  }
}

void require_filled(const torch::Tensor& tensor, double value, const std::string& what) {
  require(tensor.defined() && tensor.allclose(torch::full_like(tensor, value), 1e-5, 1e-7),
          what + " is wrong");
}

ddp::ContextOptions options() {
  ddp::ContextOptions options;
  options.device = ddp::DeviceChoice::Cpu;
  options.control_plane.heartbeat_interval = 200ms;
  return options;
}

// All elements stay equal, because all features of a sample are.
torch::nn::Linear make_module() {
  torch::nn::Linear module(torch::nn::LinearOptions(kFeatures, 1).bias(false));
  const torch::NoGradGuard no_grad;
  module->weight.fill_(1);
  return module;
}

// The gradient of the sum of the outputs is (r + 1)^2 on rank r: r + 1 samples of that value.
torch::Tensor batch_of(int rank) {
  return torch::full({rank + 1, kFeatures}, rank + 1.0);
}

double sum_of_squares(int world_size) {
  return world_size * (world_size + 1) * (2 * world_size + 1) / 6.0;
}

void check_membership(const ddp::Context& context, int64_t generation, int rank, int world_size) {
  const auto half = context.communicator()->split(context.rank() % 2, 0);
  for (const auto* membership : {&context.membership(), &context.control_plane().membership(),
                                 &context.communicator()->membership()}) {
    require(membership->generation == generation && membership->rank == rank &&
                membership->world_size == world_size &&
                static_cast<int>(membership->hosts.size()) == world_size,
            "a membership is wrong");
  }
  require(half->membership().generation == generation &&
              half->world_size() == (world_size + 1 - rank % 2) / 2,
          "the membership of a group is wrong");
  require(context.local_rank() == rank && context.local_world_size() == world_size,
          "the place on the host is wrong");
  require(static_cast<int>(context.control_plane().all_gather("x").size()) == world_size,
          "the control plane has other ranks");
}

void check_samples(const ddp::Context& context) {
  const int n = context.world_size();
  const ddp::DistributedSampler sampler(10, context.communicator(), {.shuffle = false});
  std::vector<int64_t> expected;
  for (int64_t place = context.rank(); place < (10 + n - 1) / n * n; place += n) {
    expected.push_back(place % 10);
  }
  require(sampler.indices() == expected, "the samples of the ranks are wrong");
}

// Means over ranks, then means over samples, then the same with a sharded optimizer. Returns the
// weight, which started as `weight`.
double train(const ddp::Context& context, torch::nn::Linear module, double weight) {
  const int n = context.world_size();
  const auto batch = batch_of(context.rank());
  for (const bool zero1 : {false, true}) {
    ddp::DistributedDataParallel model(module, context.communicator());
    const auto optimizer = ddp::make_optimizer(model, {.zero1 = zero1});
    for (int step = 0; step < 4; ++step) {
      context.set_progress(step, "forward");
      const bool is_weighted = step % 2 == 1;
      model.zero_grad();
      if (is_weighted) {
        model.weighted_backward(model.forward(batch).sum(), context.rank() + 1.0);
      } else {
        model.forward(batch).sum().backward();
      }
      const double gradient = sum_of_squares(n) / (is_weighted ? n * (n + 1) / 2.0 : n);
      if (!zero1) {
        require_filled(module->weight.grad(), gradient, "a gradient");
      }
      optimizer->step(kLr);
      weight -= kLr * gradient;
      require_filled(module->weight.detach(), weight, "a weight");
    }
  }
  return weight;
}

// One generation of a rank: its Context, and what ends the process if that generation fails.
struct Generation {
  explicit Generation(ddp::Context met) : context(std::move(met)), watch(context.control_plane()) {}

  ddp::Context context;
  ddp::detail::FailureWatch watch;
};

// Returns nothing on the rank that leaves.
std::unique_ptr<Generation> next(std::unique_ptr<Generation> last, int leaver) {
  const auto kept = last->context.communicator();
  last->watch.detach();
  auto met = ddp::detail::ContextHandle(last->context)
                 .meet_again(options(), last->context.rank() != leaver);
  last.reset();
  bool refused = false;
  try {
    kept->barrier();
  } catch (const ddp::PeerLostError&) {
    refused = true;
  }
  require(refused || kept->world_size() == 1, "a communicator outlived its generation");
  if (!met) {
    std::puts("left");
    std::fflush(stdout);
    return nullptr;
  }
  return std::make_unique<Generation>(*std::move(met));
}

void run_train(const std::vector<int>& leavers) {
  auto current = std::make_unique<Generation>(ddp::Context::create(options()));
  auto module = make_module();
  double weight = 1;
  int rank = current->context.rank();
  const int world_size = current->context.world_size();
  for (std::size_t generation = 0;; ++generation) {
    const auto& context = current->context;
    check_membership(context, static_cast<int64_t>(generation), rank,
                     world_size - static_cast<int>(generation));
    check_samples(context);
    weight = train(context, module, weight);
    if (generation == leavers.size()) {
      break;
    }
    const int leaver = leavers[generation];
    current = next(std::move(current), leaver);
    if (current == nullptr) {
      return;
    }
    rank -= rank > leaver ? 1 : 0;
  }
  current->context.close();
  std::puts("done");
}

std::string failed_file() {
  return std::string(std::getenv("DDP_TEST_FOLDER")) + "/failed";
}

// MPI cannot end in order after a failure, and its end waits for all processes.
[[noreturn]] void leave_after_failure() {
  while (!std::filesystem::exists(failed_file())) {
    std::this_thread::sleep_for(20ms);
  }
  std::_Exit(0);
}

void run_fail(int leaver, int culprit) {
  auto current = next(std::make_unique<Generation>(ddp::Context::create(options())), leaver);
  if (current == nullptr) {
    leave_after_failure();
  }
  const auto& context = current->context;
  try {
    train(context, make_module(), 1);  // others may be in its last collective when a rank fails
    context.set_progress(7, "backward");
    if (context.rank() == culprit) {
      throw ddp::DataError("shard 3 is truncated");
    }
    context.control_plane().barrier();
  } catch (const ddp::Error& error) {
    ddp::FailureCause cause;
    cause.message = error.what();
    cause.exit_code = error.exit_code();
    context.control_plane().publish_failure(cause);  // only the first one counts
    std::ofstream(failed_file()) << "failed";
    const auto failure = context.control_plane().failure();
    require(failure.generation == 1 && failure.rank == culprit, "another generation's failure");
    const auto end = ddp::detail::job_end_of(context.control_plane());
    require(end.has_value(), "the policy was not asked");
    throw ddp::Error(end->exit_code, error.what());
  }
}

void run(const std::vector<std::string>& arguments) {
  std::vector<int> numbers;
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    numbers.push_back(std::stoi(arguments[i]));
  }
  if (arguments.at(0) == "train") {
    run_train(numbers);
  } else {
    run_fail(numbers.at(0), numbers.at(1));
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run({argv + 1, argv + argc});
    return 0;
  } catch (const ddp::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.exit_code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
