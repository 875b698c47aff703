// SPDX-License-Identifier: Apache-2.0
// Captures that fail while a step's host state is changed: gradients on side streams, sharded
// gradients. The following eager step must not see these changes.
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include "gpu/graph/graphed_step_test.hpp"
#include "ops/streams/side_streams.hpp"
#include "ops/vision/convolution_algorithms.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

enum class Place { None, BeforeBackward, InBackward, AfterBackward, AtEnd };
Place failing_place = Place::None;

void pass(Place place) {
  if (place == failing_place &&
      c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    throw std::runtime_error("a failing capture");
  }
}

struct PassInBackward : torch::autograd::Function<PassInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*ctx*/, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*ctx*/,
                                                 torch::autograd::variable_list grads) {
    pass(Place::InBackward);
    return grads;
  }
};

at::Tensor convolve(const at::Tensor& x, const at::Tensor& weight) {
  return ops::conv2d(x, weight, 1, 1, ops::Conv2dAlgorithm::Product);
}

/// Filters with one tap that sees more than padding, as in the last layers of a ResNet, and a
/// shortcut on a side stream.
struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    for (int64_t i = 0; i < 3; ++i) {
      weights.push_back(register_parameter(
          "weight" + std::to_string(i),
          (integers({8, 8, 3, 3}, 3 + i).cpu() / 32.0).contiguous(at::MemoryFormat::ChannelsLast)));
    }
    to(context().device());
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = convolve(x, weights[0]);
    ops::SideTask shortcut(y, [&](const at::Tensor& in) { return convolve(in, weights[1]); });
    const auto main = convolve(PassInBackward::apply(y), weights[2]);
    return main + shortcut.wait();
  }
  std::vector<at::Tensor> weights;
};
TORCH_MODULE(Block);

struct Result {
  std::vector<double> losses;
  std::vector<at::Tensor> tensors;
  std::string why_eager;
};

Result trained(const OptimizerOptions& options, CudaGraph mode) {
  Block module;
  DistributedDataParallel model(module, group(), with_cap(1e-6));
  auto optimizer = make_optimizer(model, options);
  GraphedStep step(
      context(), {.models = {&model}, .optimizers = {optimizer.get()}},
      [&](const at::Tensor& batch, const StepScalars& scalars) {
        const ops::SideStreams streams;
        model.zero_grad();
        auto loss = model.forward(batch).square().mean();
        pass(Place::BeforeBackward);
        loss.backward();
        pass(Place::AfterBackward);
        optimizer->step(scalars);
        pass(Place::AtEnd);
        return loss;
      },
      GraphedStepOptions{.mode = mode});
  Result result;
  for (int i = 0; i < 10; ++i) {
    const auto x = integers({4, 8, 1, 1}, 100 * i + rank()) / 8.0;
    result.losses.push_back(
        step(x.contiguous(at::MemoryFormat::ChannelsLast), {.lr = 0.05, .step = i}).log[0]);
  }
  for (const StateDict& state : {model.state_dict(), optimizer->state_dict()}) {
    for (const auto& [name, tensor] : state.tensors) {
      result.tensors.push_back(tensor.clone());
    }
  }
  result.why_eager = step.counts().why_eager;
  return result;
}

std::vector<std::pair<std::string, OptimizerOptions>> optimizers() {
  OptimizerOptions whole;
  whole.momentum = 0.9;
  whole.weight_decay = 0.01;
  auto sharded = whole;
  sharded.zero1 = true;
  return {{"whole", whole}, {"sharded", sharded}};
}

}  // namespace

TEST_CASE("a capture that fails in the middle of a step leaves no trace") {
  for (const auto& [name, options] : optimizers()) {
    CAPTURE(name);
    failing_place = Place::None;
    const auto eager = trained(options, CudaGraph::Off);
    for (const auto place :
         {Place::BeforeBackward, Place::InBackward, Place::AfterBackward, Place::AtEnd}) {
      CAPTURE(static_cast<int>(place));
      failing_place = place;
      const auto failed = trained(options, CudaGraph::Auto);
      REQUIRE_THAT(failed.why_eager, Catch::Contains("a failing capture"));
      REQUIRE(failed.losses == eager.losses);
      require_equal(failed.tensors, eager.tensors);
    }
    failing_place = Place::None;
    const auto graphed = trained(options, CudaGraph::On);
    REQUIRE(graphed.losses == eager.losses);
    require_equal(graphed.tensors, eager.tensors);
  }
}
