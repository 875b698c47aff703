// SPDX-License-Identifier: Apache-2.0
// A training whose rank 1 makes the others wait from program.step on, and what the hang doctor says
// of it:
//
//   doctor_program program.fault=loader    its loader has no batch: the others time out
//   doctor_program program.fault=computes  it computes for long: the others time out
//   doctor_program program.fault=sleeps    it sleeps for long in the program: the others time out
//   doctor_program program.fault=freezes   it is stopped
//   doctor_program program.fault=size      it reduces a larger tensor: MPI fails
//   doctor_program program.fault=asked     it sleeps; SIGUSR2 asks rank 0, and the job goes on
//
// Runs on the device of DDP_TEST_DEVICE, with train.cuda_graph=on in CUDA graphs.
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ddp/data/data_loader.hpp"
#include "ddp/ddp.hpp"
#include "distributed/comm/stop_for.hpp"

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

struct Program {
  std::string fault = "asked";
  int64_t step = 3;
};
void describe_fields(Program& options, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "fault",
                 .doc = "what goes wrong",
                 .choices = {"loader", "computes", "sleeps", "freezes", "size", "asked"}},
                options.fault);
  visitor.field({.name = "step", .doc = "in which step", .min = 0}, options.step);
}

class Samples final : public ddp::Dataset {
 public:
  explicit Samples(bool blocks) : blocks_(blocks) {}
  int64_t size() const override { return 64; }
  ddp::Example get(int64_t index) const override {
    // In a batch of rank 1: the fifth of three ranks.
    if (blocks_ && index == 25) {
      std::this_thread::sleep_for(5s);
    }
    return {torch::ones({4}), torch::zeros({}, torch::kLong)};
  }

 private:
  const bool blocks_;
};

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return second(first(x)); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(4, 4));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(4, 2));
};
TORCH_MODULE(Net);

void compute_for(Clock::duration time) {
  volatile double sum = 0;
  for (const auto start = Clock::now(); Clock::now() - start < time;) {
    sum = sum + 1;
  }
}

void do_the_deed(const ddp::Context& context, const std::string& fault) {
  const bool is_culprit = context.rank() == 1;
  if (fault == "size") {
    const auto tensor = torch::ones({is_culprit ? 20 : 10}, context.device());
    context.communicator()->all_reduce(tensor)->wait_host();
  } else if (fault == "computes" && is_culprit) {
    compute_for(5s);
  } else if (fault == "sleeps" && is_culprit) {
    std::this_thread::sleep_for(5s);
  } else if (fault == "freezes" && is_culprit) {
    stop_for(4s);
  } else if (fault == "asked" && is_culprit) {
    std::this_thread::sleep_for(4s);
  }
}

void train(ddp::Context& context, const ddp::Config& config) {
  const auto& [fault, fault_step] = config.section<Program>("program");
  Net module;
  module->to(context.device());
  auto options = config.ddp;
  options.bucket_cap_mb = 1.0 / (1 << 20);  // a bucket for each parameter
  ddp::DistributedDataParallel<Net> model(module, context.communicator(), options);
  const auto samples = std::make_shared<Samples>(fault == "loader" && context.rank() == 1);
  const ddp::DistributedSampler sampler(samples->size(), context.communicator(),
                                        {.shuffle = false});
  ddp::LoaderOptions loader_options;
  loader_options.batch_size = 2;
  ddp::DataLoader loader(samples, sampler, context.device(), loader_options);
  const auto optimizer = ddp::make_optimizer(model, config.optimizer);
  ddp::GraphedStep train_step(
      context, {.models = {&model}, .optimizers = {optimizer.get()}},
      [&](const ddp::Batch& batch, const ddp::StepScalars& scalars) {
        model.zero_grad();
        const auto loss = model.forward(batch.data).sum();
        loss.backward();
        optimizer->step(scalars);
        return loss;
      },
      ddp::GraphedStepOptions{.mode = config.train.cuda_graph});
  ddp::Metrics metrics(context, config.metrics);
  std::thread asking;
  for (int64_t step = 0; step < fault_step + 3; ++step) {
    auto batch = loader.next();
    if (step == fault_step) {
      if (fault == "asked" && context.is_main()) {
        asking = std::thread([] {
          std::this_thread::sleep_for(2500ms);
          kill(getpid(), SIGUSR2);
        });
      }
      do_the_deed(context, fault);
    }
    const auto result = train_step(batch, {.lr = 0.01, .step = step});
    metrics.end_step(step, {.loss = result.outputs, .num_samples = 2});
  }
  if (asking.joinable()) {
    asking.join();
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<const char*> arguments(argv, argv + argc);
  const auto device = std::string("context.device=") + std::getenv("DDP_TEST_DEVICE");
  arguments.push_back(device.c_str());
  return ddp::run(static_cast<int>(arguments.size()), arguments.data(), train,
                  {ddp::declare_section<Program>("program")});
}
