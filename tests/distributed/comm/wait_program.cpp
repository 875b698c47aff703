// SPDX-License-Identifier: Apache-2.0
// Ranks that wait for each other in ddp::run:
//
//   wait_program program.fault=FAULT   forever, at step 3: all end soon
//   wait_program program.fault=none    for long, and every wait ends
//   wait_program program.fault=places  forever with context.communicator.check_collectives=true,
//                                      otherwise the wait ends
//
// Runs on the device of DDP_TEST_DEVICE; the last one on the CPU only.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/control/failure/failure_cause.hpp"
#include "ddp/comm/functional.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/stop_signal.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/reduce/join.hpp"
#include "ddp/train/checkpoint.hpp"
#include "ddp/train/run.hpp"
#include "support/fuse.hpp"

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using ddp::test::Fuse;

struct Program {
  std::string fault = "none";
};
void describe_fields(Program& options, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "fault",
                 .doc = "what goes wrong",
                 .choices = {"none", "uneven", "plane", "operation", "save", "stop", "backward",
                             "places", "frozen", "gradient", "thrown"}},
                options.fault);
}

Clock::time_point start;

void say_when(const char* what, std::chrono::seconds limit) {
  const auto passed = Clock::now() - start;
  std::fprintf(stderr, "%s %s\n", what, passed < limit ? "in time" : "late");
  std::fprintf(
      stderr, "%s after %ld ms\n", what,
      static_cast<long>(std::chrono::duration_cast<std::chrono::milliseconds>(passed).count()));
}

// Longer than the time after which a waiting rank's position is examined.
constexpr auto kLong = 400ms;

class SlowState final : public ddp::Stateful {
 public:
  explicit SlowState(std::chrono::milliseconds time) : time_(time) {}
  std::string state_name() const override { return "slow"; }
  ddp::StateDict state_dict() const override {
    std::this_thread::sleep_for(time_);
    return {};
  }
  void load_state_dict(const ddp::StateDict&) override {}

 private:
  const std::chrono::milliseconds time_;
};

void reduce(ddp::Communicator& communicator) {
  communicator.all_reduce(torch::ones({100}, communicator.device()))->wait_host();
}

void train(ddp::Context& context, const std::string& fault, ddp::Checkpointer& checkpointer) {
  auto& communicator = *context.communicator();
  const bool uneven = fault == "uneven" || fault == "stop";
  for (int64_t step = 0; step < (uneven && context.rank() == 1 ? 3 : 6); ++step) {
    context.set_progress(step, "forward");
    reduce(communicator);
    if (step < 3) {
      continue;
    }
    if (context.is_main() && fault == "plane") {
      context.control_plane().all_gather("mine");
    }
    if (context.is_main() && fault == "save") {
      checkpointer.save(step);
    }
    if (context.rank() == 1 && fault == "operation") {
      communicator.barrier();
    }
  }
  if (fault == "stop" && context.rank() == 1) {
    throw ddp::Stop("this rank alone");
  }
}

// Rank 1 catches an exception of its backward at step 3 and continues. The other ranks have no
// exception: their weights are no longer those of rank 1.
void train_past_an_exception(ddp::Context& context) {
  torch::nn::Linear module(4, 2);
  module->to(context.device());
  ddp::DistributedDataParallel<torch::nn::Linear> model(module, context.communicator());
  const auto inputs = torch::ones({2, 4}, context.device()).requires_grad_();
  for (int64_t step = 0; step < 6; ++step) {
    context.set_progress(step, "forward");
    Fuse::blows = step == 3 && context.rank() == 1;
    auto loss = model.forward(Fuse::apply(inputs)).sum();
    try {
      loss.backward();
    } catch (const std::runtime_error&) {
      start = Clock::now();
    }
  }
}

// Rank 1 alone freezes a parameter at step 3.
void train_unlike_frozen(ddp::Context& context) {
  torch::nn::Linear module(4, 2);
  module->to(context.device());
  ddp::DistributedDataParallel<torch::nn::Linear> model(module, context.communicator());
  for (int64_t step = 0; step < 6; ++step) {
    context.set_progress(step, "forward");
    if (step == 3) {
      module->bias.set_requires_grad(context.rank() != 1);
      start = Clock::now();
    }
    model.forward(torch::ones({2, 4}, context.device())).sum().backward();
  }
}

// From step 3 on rank 1 needs no gradient of an all_gather, or it fails after its forward. The
// other ranks wait in the backward.
void train_without_a_gradient(ddp::Context& context, bool throws) {
  for (int64_t step = 0; step < 6; ++step) {
    context.set_progress(step, "forward");
    const bool is_odd = step >= 3 && context.rank() == 1;
    const auto input = torch::ones({2, 4}, context.device()).set_requires_grad(!is_odd || throws);
    const auto all = ddp::all_gather_with_grad(input, context.communicator());
    if (is_odd && throws) {
      start = Clock::now();
      throw std::runtime_error("my loss is wrong");
    }
    if (all.requires_grad()) {
      all.sum().backward();
    }
  }
}

struct FusedImpl : torch::nn::Module {
  explicit FusedImpl(bool breaks_first) : breaks_before_all_gradients(breaks_first) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const auto hidden = first(x);
    return breaks_before_all_gradients ? Fuse::apply(second(hidden)) : second(Fuse::apply(hidden));
  }
  const bool breaks_before_all_gradients;
  torch::nn::Linear first = register_module("first", torch::nn::Linear(4, 4));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(4, 2));
};
TORCH_MODULE(Fused);

// Every rank catches an exception of its backward at step 3 and continues. Rank 1 has reduced no
// bucket of that backward. The other ranks have reduced some.
void train_past_exceptions(ddp::Context& context) {
  Fused module(context.rank() == 1);
  module->to(context.device());
  ddp::DdpOptions options;
  options.bucket_cap_mb = 1.0 / (1 << 20);  // a bucket for each parameter
  ddp::DistributedDataParallel<Fused> model(module, context.communicator(), options);
  for (int64_t step = 0; step < 6; ++step) {
    context.set_progress(step, "forward");
    Fuse::blows = step == 3;
    auto loss = model.forward(torch::ones({2, 4}, context.device())).sum();
    if (step <= 3) {
      start = Clock::now();
    }
    try {
      loss.backward();
    } catch (const ddp::Error&) {
      throw;
    } catch (const std::runtime_error&) {
      std::fprintf(stderr, "caught at step %d\n", static_cast<int>(step));
    }
  }
}

void sleep_on(const ddp::Context& context, int rank) {
  if (context.rank() == rank) {
    std::this_thread::sleep_for(kLong);
  }
}

// One rank calls a collective, continues, and reaches the control plane late.
void wait_beside_a_collective(ddp::Context& context) {
  auto tensor = torch::ones({100});
  if (context.is_main()) {
    const auto work = context.communicator()->all_reduce(tensor);
    std::this_thread::sleep_for(kLong);
    context.control_plane().barrier();
    work->wait();
  } else {
    context.control_plane().barrier();
    context.communicator()->all_reduce(tensor)->wait();
  }
}

// Two ranks wait for each other; the third is not involved.
void wait_in_a_part(ddp::Context& context) {
  const auto part = context.communicator()->split(context.rank() < 2 ? 0 : -1, 0);
  auto tensor = torch::ones({100});
  if (context.rank() < 2) {
    sleep_on(context, 1);
    part->all_reduce(tensor)->wait();
    sleep_on(context, 1);
    const auto work = context.is_main() ? context.communicator()->recv(tensor, 1)
                                        : context.communicator()->send(tensor, 0);
    work->wait();
  }
  context.control_plane().barrier();
}

void wait_in_join(ddp::Context& context) {
  ddp::DistributedDataParallel<torch::nn::Linear> model(torch::nn::Linear(4, 2),
                                                        context.communicator());
  const int num_batches = context.rank() == 1 ? 1 : 3;
  ddp::join(model, [&] {
    for (int batch = 0; batch < num_batches; ++batch) {
      sleep_on(context, 0);  // stands for a slow loader
      model.forward(torch::ones({2, 4})).sum().backward();
    }
  });
}

// Another thread uses the control plane.
void wait_in_two_threads(ddp::Context& context) {
  std::thread other([&] {
    sleep_on(context, 0);
    context.control_plane().barrier();
  });
  sleep_on(context, 1);
  sleep_on(context, 1);
  reduce(*context.communicator());
  other.join();
}

void wait_for_long(ddp::Context& context, ddp::Checkpointer& checkpointer, bool checks) {
  context.set_progress(1, "");
  sleep_on(context, 1);  // stands for a slow loader
  reduce(*context.communicator());
  if (!checks) {  // with checks, the call returns only after all ranks have called
    wait_beside_a_collective(context);
  }
  wait_in_a_part(context);
  checkpointer.save(1);  // slow on one rank
  reduce(*context.communicator());
  wait_in_join(context);
  wait_in_two_threads(context);
  sleep_on(context, 0);  // stands for rank 0's own evaluation, after the others have left
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<const char*> arguments(argv, argv + argc);
  const auto folder = std::string("checkpoint.dir=") + std::getenv("DDP_TEST_FOLDER") + "/saved";
  const auto device = std::string("context.device=") + std::getenv("DDP_TEST_DEVICE");
  arguments.insert(arguments.end(), {device.c_str(), folder.c_str()});
  const auto run = [](ddp::Context& context, const ddp::Config& config) {
    const auto fault = config.section<Program>("program").fault;
    context.control_plane().add_failure_callback(
        [](const ddp::FailureCause&) { say_when("heard", 2s); });
    SlowState state(fault == "none" && context.rank() == 0 ? kLong : 0ms);
    ddp::Checkpointer checkpointer(context, config.checkpoint, {state});
    checkpointer.restore();
    start = Clock::now();
    if (fault == "none") {
      wait_for_long(context, checkpointer, config.context.communicator.check_collectives);
    } else if (fault == "backward") {
      train_past_an_exception(context);
    } else if (fault == "frozen") {
      train_unlike_frozen(context);
    } else if (fault == "gradient" || fault == "thrown") {
      train_without_a_gradient(context, fault == "thrown");
    } else if (fault == "places") {
      train_past_exceptions(context);
    } else {
      train(context, fault, checkpointer);
    }
  };
  const int code = ddp::run(static_cast<int>(arguments.size()), arguments.data(), run,
                            {ddp::declare_section<Program>("program")});
  say_when("left", 5s);
  return code;
}
