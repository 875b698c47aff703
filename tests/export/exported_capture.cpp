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

struct Result {
  ddp::TensorMap state;
  std::string losses;
  double ms = 0;         // of a step of the second half
  int64_t replayed = 0;  // steps
};

// Trains a fresh copy of the archive.
Result train(ddp::Context& context, const std::string& folder, ddp::CudaGraph mode) {
  TrainingCase data(folder);
  ddp::DistributedDataParallel model(data.module, context.communicator());
  const auto optimizer = ddp::make_optimizer(model, {});
  torch::manual_seed(1);
  ddp::GraphedStep step(
      context, {.models = {&model}, .optimizers = {optimizer.get()}},
      [&](const std::vector<at::Tensor>& batch, const ddp::StepScalars& scalars) {
        model.zero_grad();
        std::vector<at::Tensor> leaves;
        append_leaves(data.call(model, batch), leaves);
        auto loss = loss_of(leaves);
        loss.backward();
        optimizer->step(scalars);
        return std::vector{loss};
      },
      ddp::GraphedStepOptions{.mode = mode});
  const auto num_steps = data.tensors.at("losses").numel();
  std::vector<at::Tensor> losses;
  auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < num_steps; ++i) {
    if (i == num_steps / 2) {
      c10::cuda::device_synchronize();
      start = std::chrono::steady_clock::now();
    }
    const auto result = step(data.batch(i), {.lr = data.learning_rate, .step = i});
    losses.push_back(result.outputs[0].detach().to(at::kFloat).clone());
  }
  c10::cuda::device_synchronize();
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
  Result result{{},
                data.compare_losses(losses),
                time.count() / static_cast<double>(num_steps - num_steps / 2),
                step.counts().replayed};
  for (const auto& [name, tensor] : data.module->state_dict()) {
    result.state.emplace(name, tensor.cpu().clone());
  }
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: exported_capture FOLDER\n";
    return 64;
  }
  try {
    auto context = ddp::Context::create();
    const auto eager = train(context, argv[1], ddp::CudaGraph::Off);
    const auto captured = train(context, argv[1], ddp::CudaGraph::On);
    int num_different = 0;
    double greatest = 0;
    bool is_close = true;  // false for NaN too
    for (const auto& [name, tensor] : eager.state) {
      const auto& other = captured.state.at(name);
      if (!testing::same_bits(tensor, other)) {
        ++num_different;
        const auto difference =
            (tensor.to(at::kDouble) - other.to(at::kDouble)).abs().max().item<double>();
        greatest = std::max(greatest, difference);
        is_close = is_close && difference < 1e-3;
      }
    }
    std::cout << eager.state.size() - num_different << " equal, " << num_different
              << " different (by up to " << greatest << "); eager " << eager.ms << " ms, "
              << eager.losses << "; captured " << captured.ms << " ms, " << captured.losses << ", "
              << captured.replayed << " steps replayed\n";
    return is_close && captured.replayed > 0 ? 0 : 1;
  } catch (const std::exception& error) {
    std::cout << "error: " << error.what() << '\n';
    return 2;
  }
}
