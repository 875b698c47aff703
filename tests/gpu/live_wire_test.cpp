// SPDX-License-Identifier: Apache-2.0
// What is live of filters is reduced, captured and eagerly, and nobody who looks can tell.
#include <ATen/cuda/CUDAGraph.h>

#include "capture.hpp"
#include "comm/operation_log.hpp"
#include "ddp/ops/conv2d.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "distributed/ddp_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

// Over 2x2 pixels four taps of the first filter are live and one of the second, over 6x6 all.
struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl() {
    strided = register_parameter("strided", filter(1));
    bias = register_parameter("bias", integers({8}, 3).cpu());
    centre = register_parameter("centre", filter(2));
    to(context().device());
  }
  static at::Tensor filter(int64_t seed) {
    return integers({8, 8, 3, 3}, seed).cpu().contiguous(at::MemoryFormat::ChannelsLast);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto form =
        x.size(2) == 2 ? ops::Conv2dAlgorithm::Product : ops::Conv2dAlgorithm::Library;
    const auto hidden = ops::conv2d(x, strided, 2, 1, form) + bias.view({1, 8, 1, 1});
    return ops::conv2d(hidden, centre, 1, 1, form);
  }
  torch::Tensor strided, bias, centre;
};
TORCH_MODULE(ConvNet);

torch::Tensor images(int r, int64_t step, int64_t size) {
  return integers({2, 8, size, size}, 1000 * (step + 1) + r);
}

torch::Tensor all_images(int64_t step, int64_t size) {
  std::vector<torch::Tensor> parts;
  for (int r = 0; r < world(); ++r) {
    parts.push_back(images(r, step, size));
  }
  return torch::cat(parts);
}

/// An optimizer that leaves dead taps behind from its first step on, of which none changes
/// anything.
struct Run {
  explicit Run(bool skips)
      : model(module, group()), optimizer(make_optimizer(model, options(skips))) {
    backward();
    optimizer.step(StepScalars{.lr = 0.0});
  }
  static OptimizerOptions options(bool skips) {
    OptimizerOptions options;
    options.weight_decay = 0.5;
    options.implementation = OptimizerImplementation::Flat;
    options.skip_dead_taps = skips;
    return options;
  }
  void backward() {
    model.zero_grad();
    model.forward(input).sum().backward();
  }
  /// What the reductions of a captured backward send.
  std::string capture() {
    const int64_t before = group()->num_operations();
    warm_up_and_capture(graph, [this] { backward(); });
    std::string sent;
    if (const auto* log = dynamic_cast<const ddp::detail::OperationLog*>(group().get())) {
      for (const auto& operation : log->captured_operations(before)) {
        sent += operation + ';';
      }
    }
    return sent;
  }

  torch::Tensor input = images(rank(), 0, 2);
  ConvNet module;
  DistributedDataParallel<ConvNet> model;
  AnyOptimizer optimizer;
  at::cuda::CUDAGraph graph;
};

std::vector<torch::Tensor> expected_grads(ConvNet& reference, int64_t step, int64_t size) {
  return mean_reference(
      reference, [&](ConvNet& plain) { return plain->forward(all_images(step, size)).sum(); });
}

// Live elements: 4 x 64 + 8 + 64 on the wire, each gradient on 64 bytes in the bucket.
constexpr const char* kLive = "all_reduce of 328 Float;";

}  // namespace

TEST_CASE("taps that an optimizer leaves behind on all ranks do not travel") {
  const bool skips = GENERATE(false, true);
  Run run(skips);
  ConvNet reference;
  const auto sent = run.capture();
  CAPTURE(skips, sent);
  CHECK((sent.find(kLive) != std::string::npos) == (skips && world() > 1));
  for (int replay = 0; replay < 5; ++replay) {
    run.input.copy_(images(rank(), replay, 2));
    run.graph.replay();
    const auto expected = expected_grads(reference, replay, 2);
    require_equal(grads_of(*run.module), expected);
    run.backward();  // eager, the same way
    require_equal(grads_of(*run.module), expected);
  }
}

TEST_CASE("buckets on the wire go through updates beside backward whole") {
  Run run(true);
  ConvNet reference;
  run.model.reducer().set_bucket_listener([](const auto&, const auto&) {});
  const auto sent = run.capture();
  CAPTURE(sent);
  CHECK(sent.find(kLive) == std::string::npos);
  run.graph.replay();
  require_equal(grads_of(*run.module), expected_grads(reference, 0, 2));
}
