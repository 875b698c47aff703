// SPDX-License-Identifier: Apache-2.0
// A training embedded in a program of its own: a loop without ddp::run, Metrics, Checkpointer and
// set_progress. Rank 1 ends too early; the last rank then waits in a collective.
//
//   host_program leave world|split [check]     destroys all it has, then closes its Context
//   host_program die|die_early world|split     is killed at step 5, or before step 0
//
// "split": ranks 1 and above train, in a group. "check": with check_collectives. Exits with the
// exit code of the thrown error. Prints "left in time" if that came within five seconds.
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <optional>
#include <string>
#include <thread>

#include "ddp/comm/context.hpp"
#include "ddp/core/error.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// Destroyed in reverse order: the Context last, as in most programs.
struct Trainer {
  ddp::Context context;
  ddp::CommunicatorPtr group;
  std::optional<ddp::DistributedDataParallel<torch::nn::Linear>> model;
  std::unique_ptr<ddp::Optimizer> optimizer;

  Trainer(const ddp::ContextOptions& options, bool splits)
      : context(ddp::Context::create(options)), group(context.communicator()) {
    if (splits) {
      group = group->split(context.rank() == 0 ? -1 : 0, context.rank());
    }
    if (group != nullptr) {
      model.emplace(torch::nn::Linear(3, 1), group);
      optimizer = ddp::make_optimizer(*model, {});
    }
  }

  void step() {
    model->zero_grad();
    const auto loss = model->forward(torch::ones({4, 3})).square().mean();
    loss.backward();
    optimizer->step(0.01);
    auto sum = loss.detach().clone();
    group->all_reduce(sum)->wait();
  }

  void end() {
    optimizer.reset();
    model.reset();
    group.reset();
    context.close();
  }
};

void run(const std::string& fault, bool splits, bool checks, Clock::time_point& waits_since) {
  ddp::ContextOptions options;
  options.device = ddp::DeviceChoice::Cpu;
  options.communicator.check_collectives = checks;
  Trainer trainer(options, splits);
  const bool is_culprit = trainer.context.rank() == 1;
  for (int step = 0; step < 10 && trainer.group != nullptr; ++step) {
    waits_since = Clock::now();
    if (is_culprit && (fault == "die_early" || step == 5)) {
      // Rank 0 knows of earlier steps by now.
      std::this_thread::sleep_for(1s);
      if (fault != "leave") {
        raise(SIGKILL);
      }
      break;
    }
    trainer.step();
  }
  trainer.end();
}

}  // namespace

int main(int argc, char** argv) {
  const bool checks = argc > 3;
  auto waits_since = Clock::now();
  int code = 0;
  try {
    run(argv[1], std::string(argv[2]) == "split", checks, waits_since);
  } catch (const ddp::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    code = static_cast<int>(error.exit_code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    code = 1;
  }
  if (Clock::now() - waits_since < 6s) {  // the culprit slept for one second of them
    std::puts("left in time");
  }
  return code;
}
