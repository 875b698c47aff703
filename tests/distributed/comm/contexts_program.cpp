// SPDX-License-Identifier: Apache-2.0
// Several contexts in one process, and contexts in a program that uses MPI itself:
//
//   contexts_program once|twice|both|late|split|finalized|settings
//   contexts_program level SERIALIZED|MULTIPLE      MPI initialised by the program
//   contexts_program sizes OF_RANK_0 OF_OTHERS      summed without check_collectives
//
// Prints "done" on success, and "MPI was finalized" if it is finalized at the end. Exits with the
// exit code of the thrown error; with `sizes`, of the job's first failure.
#include <mpi.h>
#include <torch/torch.h>

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

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// Destroyed after all objects that libddp keeps until the process ends.
struct Farewell {
  ~Farewell() {
    int finalized = 0;
    if (MPI_Finalized(&finalized) == MPI_SUCCESS && finalized != 0) {
      std::puts("MPI was finalized");
    }
  }
};
const Farewell farewell;

ddp::Context make(std::chrono::milliseconds heartbeat = 5s) {
  ddp::ContextOptions options;
  options.device = ddp::DeviceChoice::Cpu;
  options.control_plane.heartbeat_interval = heartbeat;
  return ddp::Context::create(options);
}

void require(bool condition, const char* what) {
  if (!condition) {
    throw std::runtime_error(what);
  }
}

void use(const ddp::Context& context) {
  auto ones = torch::ones({1000});
  context.communicator()->all_reduce(ones)->wait();
  require(ones.eq(context.world_size()).all().item<bool>(), "a sum is wrong");
  auto group = context.communicator()->split(0, context.rank());
  group->barrier();
  context.control_plane().barrier();
}

void run_twice() {
  std::vector<ddp::CommunicatorPtr> kept;
  for (int i = 0; i < 3; ++i) {
    auto context = make();
    use(context);
    kept.push_back(context.communicator()->split(0, context.rank()));
    context.close();
  }
  bool refused = false;
  try {
    kept.front()->barrier();
  } catch (const ddp::PeerLostError&) {
    refused = true;  // its context is closed
  }
  require(kept.front()->world_size() == 1 || refused, "a communicator outlived its context");
}

void run_both() {
  auto first = make();
  std::optional<ddp::Context> second(make());
  use(first);
  use(*second);
  auto ones = torch::ones({10});
  auto more = torch::ones({20});
  const auto work = first.communicator()->all_reduce(ones);
  second->communicator()->all_reduce(more)->wait();
  work->wait();
  require(ones.sum().item<float>() * 2 == more.sum().item<float>(), "a sum is wrong");
  second.reset();
  use(first);
  use(make());
  use(first);
}

// One rank works for longer than the timeout for silent ranks.
void run_late() {
  auto context = make(200ms);
  use(context);
  context.close();
  if (context.rank() == 1) {
    std::this_thread::sleep_for(1500ms);
  }
}

// Closing one context does not wait for another context's call that blocks the MPI thread.
void run_split() {
  const auto first = make();
  auto second = make();
  use(first);
  use(second);
  if (first.rank() == 0) {
    std::thread other([&] { first.communicator()->split(0, 0)->barrier(); });
    std::this_thread::sleep_for(300ms);
    const auto start = Clock::now();
    second.close();
    const auto took = Clock::now() - start;
    other.join();
    require(took < 1s, "the end of a context waited for another context");
  } else {
    second.close();
    std::this_thread::sleep_for(2500ms);
    first.communicator()->split(0, 1)->barrier();
  }
  use(first);
}

void run_level(const std::string& name) {
  int provided = 0;
  const int wanted = name == "SERIALIZED" ? MPI_THREAD_SERIALIZED : MPI_THREAD_MULTIPLE;
  MPI_Init_thread(nullptr, nullptr, wanted, &provided);
  require(provided == wanted, "this MPI has no such thread level");
  try {
    use(make());
    use(make());
  } catch (...) {
    MPI_Finalize();
    throw;
  }
  int finalized = 0;
  MPI_Finalized(&finalized);
  require(finalized == 0, "a program's own MPI was finalized");
  MPI_Finalize();
}

void run_finalized() {
  MPI_Init(nullptr, nullptr);
  MPI_Finalize();
  make();
}

struct JobFailed {
  ddp::ExitCode code;
};

void run_sizes(int64_t first, int64_t other) {
  auto context = make();
  auto tensor = torch::ones({context.rank() == 0 ? first : other});
  try {
    context.communicator()->all_reduce(tensor)->wait();
    context.control_plane().barrier();  // notifies ranks that noticed nothing
  } catch (const ddp::Error& error) {
    ddp::FailureCause cause;
    cause.message = error.what();
    cause.exit_code = error.exit_code();
    context.control_plane().publish_failure(cause);
    std::fprintf(stderr, "%s\n", error.what());
    // The other rank's failure may end this rank's call first.
    throw JobFailed{context.control_plane().failure().exit_code};
  }
}

void run_settings() {
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  ddp::ContextOptions options;
  options.device = ddp::DeviceChoice::Cpu;
  options.communicator.check_collectives = rank != nullptr && std::string(rank) == "1";
  ddp::Context::create(options);
}

void run(const std::vector<std::string>& arguments) {
  const auto& mode = arguments.at(0);
  if (mode == "once") {
    use(make());
  } else if (mode == "twice") {
    run_twice();
  } else if (mode == "both") {
    run_both();
  } else if (mode == "late") {
    run_late();
  } else if (mode == "split") {
    run_split();
  } else if (mode == "finalized") {
    run_finalized();
  } else if (mode == "settings") {
    run_settings();
  } else if (mode == "level") {
    run_level(arguments.at(1));
  } else {
    run_sizes(std::stoll(arguments.at(1)), std::stoll(arguments.at(2)));
  }
  std::puts("done");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run({argv + 1, argv + argc});
    return 0;
  } catch (const JobFailed& failed) {
    return static_cast<int>(failed.code);
  } catch (const ddp::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.exit_code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
