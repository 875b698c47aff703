// SPDX-License-Identifier: Apache-2.0
// ddp::run over several ranks:
//
//   run_program program.fault=none|blocked|stop|settings program.rank=1
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <thread>

#include "core/detect_launch.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/core/stop_signal.hpp"
#include "ddp/train/run.hpp"

namespace {

using namespace std::chrono_literals;

struct Program {
  std::string fault = "none";
  int64_t rank = 1;
};
void describe_fields(Program& options, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "fault",
                 .doc = "what goes wrong",
                 .choices = {"none", "blocked", "stop", "settings", "throw"}},
                options.fault);
  visitor.field({.name = "rank", .doc = "where"}, options.rank);
}

// Stands for every destructor that waits for the other ranks. They do not know of the failure yet,
// so a barrier would wait forever unless refused.
class WaitsForPeers {
 public:
  explicit WaitsForPeers(ddp::Communicator& communicator) : communicator_(communicator) {}
  ~WaitsForPeers() {
    try {
      communicator_.barrier();
    } catch (const std::exception&) {
      ddp::log_error("the barrier was aborted");
    }
  }

 private:
  ddp::Communicator& communicator_;
};

void train(ddp::Context& context, const ddp::Config& config) {
  const auto program = config.section<Program>("program");
  const bool culprit = context.rank() == program.rank;
  ddp::StopSignal stop(context.control_plane(), 50ms);
  for (int64_t step = 0; step < 300; ++step) {
    context.set_progress(step, "forward");
    std::this_thread::sleep_for(10ms);
    if (culprit && step == 5 && program.fault == "blocked") {
      const WaitsForPeers waits(*context.communicator());
      throw ddp::DataError("shard 7 is truncated");
    }
    if (culprit && step == 5 && program.fault == "throw") {
      throw std::runtime_error("my bug");
    }
    if (culprit && step == 5 && program.fault == "stop") {
      raise(SIGUSR1);
    }
    if (program.fault != "blocked" && stop.should_stop()) {
      throw ddp::Stop("stopped: " + stop.reason());
    }
    if (step == 20 && program.fault == "none") {
      return;
    }
    if (context.control_plane().failed()) {
      throw ddp::PeerLostError("a peer failed");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<const char*> arguments(argv, argv + argc);
  arguments.push_back("context.device=cpu");
  const auto rank = ddp::detect_launch_environment({}, ddp::process_environment()).rank;
  if (std::string(argv[1]) == "program.fault=settings" && rank == 1) {
    arguments.push_back("train.max_grad_norm=5");
  }
  return ddp::run(static_cast<int>(arguments.size()), arguments.data(), train,
                  {ddp::declare_section<Program>("program"), ddp::uses({"train.max_grad_norm"})});
}
