// SPDX-License-Identifier: Apache-2.0
// A training loop without a model, whose ranks fail on purpose:
//
//   fault_program throw|data_error|exit|kill|freeze RANK   at step 5
//   fault_program suspend RANK        every rank stops for longer than the failure timeout
//   fault_program freeze_start RANK   stops before it calls MPI
//   fault_program freeze_close RANK   stops while all ranks close
//   fault_program freeze_exit RANK    stops after its context is closed
//
// Exits as ddp::run does: with the exit code of the first cause on every rank. A rank that is
// notified of a failure prints the delay ("heard after 12 ms").
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#include "core/control/failure/failure_cause.hpp"
#include "core/launch/detect_launch.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "distributed/comm/stop_for.hpp"

namespace {

using namespace std::chrono_literals;

std::string deed_file() {
  return std::string(std::getenv("DDP_TEST_FOLDER")) + "/deed";
}

int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// All processes of a host share the steady clock.
void record_the_deed() {
  std::ofstream(deed_file()) << now_ms();
}

void say_how_late() {
  int64_t deed = 0;
  if (std::ifstream(deed_file()) >> deed) {
    const int64_t late = now_ms() - deed;
    std::fprintf(stderr, "heard %s\n", late <= 500 ? "within 500 ms" : "too late");
    std::fprintf(stderr, "heard after %ld ms\n", static_cast<long>(late));
  }
}

// Destroyed after all objects that libddp keeps until the process ends.
struct Farewell {
  ~Farewell() {
    int64_t deed = 0;
    if (std::ifstream(deed_file()) >> deed) {
      std::fprintf(stderr, "left %s\n", now_ms() - deed <= 2500 ? "within 2500 ms" : "too late");
    }
  }
};
const Farewell farewell;

void do_the_deed(const std::string& fault) {
  record_the_deed();
  if (fault == "throw") {
    throw std::runtime_error("forward of layer3 went wrong");
  }
  if (fault == "data_error") {
    throw ddp::DataError("shard 7 is truncated");
  }
  if (fault == "exit") {
    std::_Exit(0);
  }
  if (fault == "kill") {
    raise(SIGKILL);
  }
  stop_for(2500ms);  // the frozen rank must notice that the job continued without it
}

void train(ddp::Context& ctx, const std::string& fault, int culprit) {
  ctx.control_plane().add_failure_callback([](const ddp::FailureCause&) { say_how_late(); });
  auto grad = torch::ones({1000});
  const bool at_end = fault == "freeze_close" || fault == "freeze_exit";
  const int64_t num_steps = fault == "suspend" || at_end ? 20 : 200;
  for (int64_t step = 0; step < num_steps; ++step) {
    ctx.set_progress(step, "forward");
    std::this_thread::sleep_for(30ms);
    if (step == 5 && fault == "suspend") {
      stop_for(3000ms);
    } else if (step == 5 && ctx.rank() == culprit && !at_end) {
      do_the_deed(fault);
    }
    ctx.set_progress(step, "backward");
    ctx.communicator()->all_reduce(grad)->wait();
  }
}

ddp::ContextOptions options_of(const std::string& fault) {
  ddp::ContextOptions options;
  const bool cuda = std::getenv("DDP_TEST_DEVICE") == std::string("cuda");
  options.device = cuda ? ddp::DeviceChoice::Cuda : ddp::DeviceChoice::Cpu;
  const bool freezes = fault == "freeze" || fault == "freeze_close" || fault == "freeze_exit";
  options.control_plane.heartbeat_interval = freezes ? 200ms : fault == "suspend" ? 400ms : 5000ms;
  if (fault == "freeze_start") {
    options.control_plane.rendezvous_timeout = 2000ms;
  }
  return options;
}

int exit_code_of(const ddp::Context& ctx, const std::exception& error) {
  const auto* known = dynamic_cast<const ddp::Error*>(&error);
  ddp::FailureCause cause;
  cause.message = error.what();
  cause.exit_code = known != nullptr ? known->exit_code() : ddp::ExitCode::UserException;
  ctx.control_plane().publish_failure(cause);
  return static_cast<int>(ctx.control_plane().failure().exit_code);
}

int run(const std::string& fault, int culprit) {
  const auto launch = ddp::detect_launch_environment({}, ddp::process_environment());
  if (fault == "freeze_start" && launch.rank == culprit) {
    stop_for(5000ms);
    return static_cast<int>(ddp::ExitCode::PeerLost);  // no other rank is left
  }
  auto ctx = ddp::Context::create(options_of(fault));
  try {
    train(ctx, fault, culprit);
    if (fault == "freeze_close" && ctx.rank() == culprit) {
      ctx.add_teardown([] {
        record_the_deed();
        stop_for(4000ms);
      });
    }
  } catch (const std::exception& error) {
    return exit_code_of(ctx, error);
  }
  ctx.close();
  if (fault == "freeze_exit" && ctx.rank() == culprit) {
    record_the_deed();
    stop_for(4000ms);
  }
  return 0;
}

}  // namespace

int main(int, char** argv) {
  const std::string fault = argv[1];
  const int culprit = std::atoi(argv[2]);
  try {
    return run(fault, culprit);
  } catch (const ddp::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.exit_code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
