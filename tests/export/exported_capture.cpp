// SPDX-License-Identifier: Apache-2.0
// exported_capture FOLDER: trains FOLDER/model.pt2 eagerly and as a captured graph on a GPU, and
// compares all parameters and buffers.
#include <c10/cuda/CUDAFunctions.h>

#include <chrono>
#include <iostream>

#include "ddp/ddp.hpp"
#include "export/training_case.hpp"
#include "support/same_bits.hpp"

using namespace export_test;

namespace {

constexpr int64_t kSteps = 10, kTimedSteps = 30;

// Trains a fresh copy of the archive. Returns its state, and the milliseconds of a later step.
std::pair<ddp::TensorMap, double> train(ddp::Context& context, const std::string& folder,
                                        ddp::CudaGraph mode) {
  TrainingCase data(folder);
  ddp::DistributedDataParallel model(data.module, context.communicator());
  const auto optimizer = ddp::make_optimizer(model, {});
  torch::manual_seed(1);
  // The inputs are members of `data`, the same in each step.
  ddp::GraphedStep step(
      context, {.models = {&model}, .optimizers = {optimizer.get()}},
      [&](const std::vector<at::Tensor>&, const ddp::StepScalars& scalars) {
        model.zero_grad();
        std::vector<at::Tensor> leaves;
        append_leaves(data.module->call(data.inputs, data.keywords), leaves);
        auto loss = loss_of(leaves);
        loss.backward();
        optimizer->step(scalars);
        return std::vector{loss};
      },
      ddp::GraphedStepOptions{.mode = mode});
  const auto run = [&](int64_t first, int64_t count) {
    for (int64_t i = first; i < first + count; ++i) {
      step({}, {.lr = 0.01, .step = i});
    }
    c10::cuda::device_synchronize();
  };
  run(0, kSteps);
  ddp::TensorMap state;
  for (const auto& [name, tensor] : data.module->state_dict()) {
    state.emplace(name, tensor.cpu().clone());
  }
  const auto start = std::chrono::steady_clock::now();
  run(kSteps, kTimedSteps);
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
  return {std::move(state), time.count() / kTimedSteps};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: exported_capture FOLDER\n";
    return 64;
  }
  try {
    auto context = ddp::Context::create();
    const auto [eager, eager_ms] = train(context, argv[1], ddp::CudaGraph::Off);
    const auto [captured, captured_ms] = train(context, argv[1], ddp::CudaGraph::On);
    int num_different = 0;
    double greatest = 0;
    for (const auto& [name, tensor] : eager) {
      const auto& other = captured.at(name);
      if (!testing::same_bits(tensor, other)) {
        ++num_different;
        greatest = std::max(
            greatest, (tensor.to(at::kDouble) - other.to(at::kDouble)).abs().max().item<double>());
      }
    }
    std::cout << eager.size() - num_different << " equal, " << num_different
              << " different (by up to " << greatest << "); eager " << eager_ms << " ms, captured "
              << captured_ms << " ms\n";
    return greatest < 1e-3 ? 0 : 1;
  } catch (const std::exception& error) {
    std::cout << "error: " << error.what() << '\n';
    return 2;
  }
}
