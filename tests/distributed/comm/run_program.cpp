// SPDX-License-Identifier: Apache-2.0
// ddp::run over several ranks:
//
//   run_program program.fault=none|blocked|stop|settings|throw|after_save|loads|lost_gpu
//               program.rank=1
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <thread>

#include "core/launch/detect_launch.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/core/stop_signal.hpp"
#include "ddp/train/checkpoint.hpp"
#include "ddp/train/run.hpp"
#include "unit/train/temporary_folder.hpp"

namespace {

using namespace std::chrono_literals;

struct Program {
  std::string fault = "none";
  int64_t rank = 1;
};
void describe_fields(Program& options, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "fault",
                 .doc = "what goes wrong",
                 .choices = {"none", "blocked", "stop", "settings", "throw", "after_save", "loads",
                             "lost_gpu"}},
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

// A stop whose callback after the save throws on rank 0.
void stop_with_failing_callback(ddp::Context& context, bool asks) {
  std::optional<testing::TemporaryFolder> folder;
  if (context.is_main()) {
    folder.emplace();
  }
  ddp::CheckpointOptions options;
  options.dir = context.control_plane().broadcast(folder ? folder->file("checkpoints") : "");
  options.stop_check_seconds = 0.01;
  ddp::Checkpointer checkpointer(context, options, {});
  checkpointer.set_after_save(
      [](int64_t, const std::string&) { throw ddp::DataError("the copy failed"); });
  checkpointer.set_before_stop([&](int64_t done) {
    ddp::log_error(ddp::concat("before the stop: ", checkpointer.last_saved_step() - done,
                               " steps are not saved"));
  });
  for (int64_t step = 0; step < 3000; ++step) {
    context.set_progress(step, "forward");
    std::this_thread::sleep_for(1ms);
    if (asks && step == 5) {
      raise(SIGUSR1);
    }
    try {
      checkpointer.save_if_due(step);
    } catch (const ddp::Stop&) {
      // This rank ends with the failure's code, although it has a code of its own by then.
      while (!context.control_plane().failed()) {
        std::this_thread::sleep_for(1ms);
      }
      throw;
    }
  }
}

void train(ddp::Context& context, const ddp::Config& config) {
  const auto program = config.section<Program>("program");
  if (program.fault == "after_save") {
    return stop_with_failing_callback(context, context.rank() == program.rank);
  }
  const bool culprit = context.rank() == program.rank;
  if (program.fault == "loads") {  // a stop while a rank loads and the others wait for it
    if (culprit) {
      raise(SIGTERM);
      std::this_thread::sleep_for(60s);
    }
    context.communicator()->barrier();
  }
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
    const bool asks = program.fault != "blocked" && step % 5 == 0;
    if (asks && context.control_plane().agree_any(ddp::stop_requested())) {
      throw ddp::Stop(ddp::concat("stopped after step ", step));
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
  const bool loses_gpu = std::string(argv[1]) == "program.fault=lost_gpu";
  arguments.push_back(loses_gpu ? "context.device=auto" : "context.device=cpu");
  const auto rank = ddp::detect_launch_environment({}, ddp::process_environment()).rank;
  if (std::string(argv[1]) == "program.fault=settings" && rank == 1) {
    arguments.push_back("train.max_grad_norm=5");
  }
  if (loses_gpu && rank == 1) {
    setenv("CUDA_VISIBLE_DEVICES", "7777", 1);  // no host has so many
  }
  return ddp::run(static_cast<int>(arguments.size()), arguments.data(), train,
                  {ddp::declare_section<Program>("program"), ddp::uses({"train.max_grad_norm"})});
}
