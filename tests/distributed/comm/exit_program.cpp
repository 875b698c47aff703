// SPDX-License-Identifier: Apache-2.0
// Programs that end by exit() or with a Context in a static object:
//
//   exit_program function CODE all|RANK   ddp::run's function calls std::exit(CODE)
//   exit_program callback CODE RANK       as function, and the other ranks exit in a failure
//   callback exit_program thread CODE RANK         another thread of RANK exits while its main
//   thread waits exit_program static                   a global Context, never closed exit_program
//   local                    a Context in a static variable of a function exit_program communicator
//   a static object keeps a communicator exit_program static_exit CODE         a global Context,
//   and main() returns CODE exit_program child                    a child of fork() exits
//
// Runs on the device of DDP_TEST_DEVICE. Prints "left" from the destructor of a global object.
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/control/failure/failure_cause.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/core/error.hpp"
#include "ddp/train/run.hpp"

namespace {

using namespace std::chrono_literals;

struct Farewell {
  ~Farewell() { std::fprintf(stderr, "left\n"); }
};
const Farewell farewell;

std::optional<ddp::Context> global_context;
ddp::CommunicatorPtr global_communicator;

void use(const ddp::Context& context) {
  auto ones = torch::ones({1000}, context.device());
  context.communicator()->all_reduce(ones)->wait_host();
  context.control_plane().barrier();
}

bool on_gpu() {
  const char* device = std::getenv("DDP_TEST_DEVICE");
  return device != nullptr && std::string(device) == "cuda";
}

ddp::Context make() {
  ddp::ContextOptions options;
  options.device = on_gpu() ? ddp::DeviceChoice::Cuda : ddp::DeviceChoice::Cpu;
  return ddp::Context::create(options);
}

int run_function(const std::string& mode, int code, const std::string& who) {
  const std::vector<const char*> arguments{"exit_program",
                                           on_gpu() ? "context.device=cuda" : "context.device=cpu"};
  return ddp::run(static_cast<int>(arguments.size()), arguments.data(),
                  [&](ddp::Context& context, const ddp::Config&) {
                    const bool exits = who == "all" || std::to_string(context.rank()) == who;
                    if (mode == "callback") {
                      context.control_plane().add_failure_callback(
                          [code](const ddp::FailureCause&) { std::exit(code); });
                    }
                    std::optional<std::thread> other;
                    for (int64_t step = 0; step < 1000; ++step) {
                      context.set_progress(step, "forward");
                      if (step == 5 && exits && mode == "thread") {
                        other.emplace([code] { std::exit(code); });
                        std::this_thread::sleep_for(60s);
                      } else if (step == 5 && exits) {
                        std::exit(code);
                      }
                      use(context);
                    }
                  });
}

void run_child(const ddp::Context& context) {
  use(context);
  if (const pid_t child = fork(); child == 0) {
    std::exit(0);  // must not speak for its parent
  } else {
    int status = 0;
    waitpid(child, &status, 0);
    std::fprintf(stderr, "the child ended with %d\n", status);
  }
  use(context);
}

int run(const std::vector<std::string>& arguments) {
  const auto& mode = arguments.at(0);
  if (mode == "function" || mode == "callback" || mode == "thread") {
    return run_function(mode, std::stoi(arguments.at(1)), arguments.at(2));
  }
  if (mode == "local") {
    static const auto context = make();
    use(context);
    return 0;
  }
  global_context.emplace(make());
  use(*global_context);
  if (mode == "communicator") {
    global_communicator = global_context->communicator()->split(0, global_context->rank());
    global_context->close();
  } else if (mode == "child") {
    run_child(*global_context);
  }
  return mode == "static_exit" ? std::stoi(arguments.at(1)) : 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const ddp::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.exit_code());
  }
}
