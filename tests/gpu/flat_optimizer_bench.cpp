// SPDX-License-Identifier: Apache-2.0
// Times the passes of flat optimizers on one GPU, and the lists of ATen's kernels ("[bench]").
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/torch.h>

#include <algorithm>
#include <iostream>

#include "ddp/optim/ema.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "support/catch.hpp"
#include "unit/optim/optim_test_support.hpp"

using namespace optim_test;
using ddp::NamedParameters;
using ddp::OptimizerImplementation;
using ddp::OptimizerOptions;
using ddp::OptimizerType;

namespace {

// Roughly the sizes of a ResNet's parameters, of which `num_weights` hold nearly all elements.
NamedParameters bench_parameters(int64_t numel, int64_t num_segments, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype).device(at::kCUDA);
  const int64_t num_weights = num_segments / 3;
  NamedParameters parameters;
  for (int64_t k = 0; k < num_segments; ++k) {
    // One third are weights, of sizes 1 : 2 : …; the rest are norms.
    const bool is_weight = k % 3 == 0 && k / 3 < num_weights;
    const int64_t share = numel * 2 * (k / 3 + 1) / (num_weights * (num_weights + 1));
    const int64_t size = is_weight ? share : 256;
    at::Tensor leaf = at::randn({size}, options).mul_(0.05);
    parameters.push_back({ddp::concat("p", k), leaf.requires_grad_()});
  }
  return parameters;
}

void attach_gradients(const NamedParameters& parameters, at::ScalarType dtype) {
  for (const auto& parameter : parameters) {
    parameter.tensor.mutable_grad() =
        at::randn(parameter.tensor.sizes(), at::TensorOptions().dtype(dtype).device(at::kCUDA));
  }
}

int64_t count(const NamedParameters& parameters) {
  int64_t total = 0;
  for (const auto& parameter : parameters) {
    total += parameter.tensor.numel();
  }
  return total;
}

// Median microseconds of 15 replays of a captured `body`, each with a cold L2 cache.
template <typename Body>
double median_us(Body body) {
  body();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  body();
  graph.capture_end();
  const auto stream = at::cuda::getCurrentCUDAStream();
  const at::Tensor flush =
      at::empty({64 << 20}, at::TensorOptions().dtype(at::kFloat).device(at::kCUDA));
  std::vector<double> times;
  for (int i = 0; i < 15; ++i) {
    flush.fill_(static_cast<double>(i));
    c10::Event begin(c10::DeviceType::CUDA, c10::EventFlag::BACKEND_DEFAULT);
    c10::Event end(c10::DeviceType::CUDA, c10::EventFlag::BACKEND_DEFAULT);
    begin.record(stream);
    graph.replay();
    end.record(stream);
    end.synchronize();
    times.push_back(begin.elapsedTime(end) * 1000.0);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void report(const std::string& name, double elements, int64_t bytes_each, double us) {
  std::cout << name << ": " << elements / 1e6 << " M, " << bytes_each << " B each: " << us
            << " us, " << elements * static_cast<double>(bytes_each) / us / 1e6 / 4.3 * 100.0
            << " % of 4.3 TB/s" << std::endl;
}

struct Model {
  std::string name;
  int64_t numel;
  int64_t num_segments;
};
const Model kResNet50{"resnet50", 25'600'000, 161};
const Model kResNet18{"resnet18", 11'200'000, 62};
const Model kGpt2{"gpt2", 124'400'000, 148};

void bench_step(const std::string& name, const Model& model, const OptimizerOptions& options,
                int64_t state_bytes, at::ScalarType leaf, at::ScalarType grad) {
  const c10::cuda::CUDAStreamGuard on_stream(c10::cuda::getStreamFromPool());
  NamedParameters parameters = bench_parameters(model.numel, model.num_segments, leaf);
  attach_gradients(parameters, grad);
  auto optimizer = ddp::make_optimizer(parameters, options);
  const at::Tensor lr =
      at::full({}, 1e-3F, at::TensorOptions().dtype(at::kFloat).device(at::kCUDA));
  const double us = median_us([&] { optimizer->step(ddp::StepScalars{.lr = lr}); });
  const auto bytes = static_cast<int64_t>(c10::elementSize(grad)) + state_bytes +
                     (leaf == at::kFloat ? 0 : static_cast<int64_t>(c10::elementSize(leaf)));
  report(ddp::concat(name, " ", model.name, " leaf ", leaf, " grad ", grad),
         static_cast<double>(count(parameters)), bytes, us);
}

void bench_scan(const Model& model, at::ScalarType grad, OptimizerImplementation implementation) {
  const c10::cuda::CUDAStreamGuard on_stream(c10::cuda::getStreamFromPool());
  NamedParameters parameters = bench_parameters(model.numel, model.num_segments, at::kFloat);
  attach_gradients(parameters, grad);
  OptimizerOptions options;
  auto optimizer = ddp::make_optimizer(parameters, as(options, implementation));
  const double us = median_us([&] { optimizer->scan_gradients(0.5, 1.0); });
  const bool is_list = implementation == OptimizerImplementation::List;
  report(ddp::concat(is_list ? "list scan " : "scan ", model.name, " grad ", grad),
         static_cast<double>(count(parameters)), static_cast<int64_t>(c10::elementSize(grad)), us);
}

void bench_average(const Model& model, at::ScalarType leaf) {
  const c10::cuda::CUDAStreamGuard on_stream(c10::cuda::getStreamFromPool());
  NamedParameters parameters = bench_parameters(model.numel, model.num_segments, leaf);
  ddp::Ema ema(parameters, {.decay = 0.999});
  const double us = median_us([&] { ema.update(); });
  report(ddp::concat("ema ", model.name, " weight ", leaf), static_cast<double>(count(parameters)),
         8 + static_cast<int64_t>(c10::elementSize(leaf)), us);
}

}  // namespace

TEST_CASE("What a flat step takes", "[.][bench]") {
  OptimizerOptions sgd;
  sgd.momentum = 0.9;
  sgd.weight_decay = 1e-4;
  OptimizerOptions adamw;
  adamw.type = OptimizerType::AdamW;
  OptimizerOptions lars = sgd;
  lars.type = OptimizerType::Lars;
  OptimizerOptions lamb = adamw;
  lamb.type = OptimizerType::Lamb;
  const auto list = [](const OptimizerOptions& o) { return as(o, OptimizerImplementation::List); };
  // Bytes of weight and state that are read and written per parameter.
  bench_step("sgd", kResNet50, sgd, 16, at::kBFloat16, at::kBFloat16);
  bench_step("sgd", kResNet50, sgd, 16, at::kBFloat16, at::kFloat);
  bench_step("sgd", kResNet50, sgd, 16, at::kFloat, at::kFloat);
  bench_step("sgd", kResNet18, sgd, 16, at::kBFloat16, at::kBFloat16);
  bench_step("sgd", kResNet18, sgd, 16, at::kFloat, at::kFloat);
  bench_step("lars", kResNet50, lars, 16 + 4 + 2, at::kBFloat16, at::kBFloat16);
  bench_step("adamw", kGpt2, adamw, 24, at::kBFloat16, at::kBFloat16);
  bench_step("adamw", kGpt2, adamw, 24, at::kFloat, at::kFloat);
  bench_step("lamb", kGpt2, lamb, 24 + 12, at::kBFloat16, at::kBFloat16);
  bench_scan(kResNet50, at::kFloat, OptimizerImplementation::Flat);
  bench_scan(kResNet18, at::kFloat, OptimizerImplementation::Flat);
  bench_scan(kResNet50, at::kFloat, OptimizerImplementation::List);
  bench_average(kResNet50, at::kFloat);
  bench_average(kResNet50, at::kBFloat16);
  bench_step("list sgd", kResNet50, list(sgd), 16, at::kBFloat16, at::kBFloat16);
  bench_step("list sgd", kResNet50, list(sgd), 16, at::kFloat, at::kFloat);
  bench_step("list sgd", kResNet18, list(sgd), 16, at::kFloat, at::kFloat);
  bench_step("list adamw", kGpt2, list(adamw), 24, at::kFloat, at::kFloat);
}
