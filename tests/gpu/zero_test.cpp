// SPDX-License-Identifier: Apache-2.0
// ZeRO-1 on GPUs: its memory savings, and captured steps. (zero_test.cpp tests its results.)
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "ddp/amp/amp.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "gpu/capture.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

OptimizerOptions adamw(bool zero1) {
  OptimizerOptions options;
  options.type = OptimizerType::AdamW;
  options.weight_decay = 0.01;
  options.zero1 = zero1;
  return options;
}

int64_t allocated_bytes() {
  torch::cuda::synchronize();
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(context().device().index());
  return stats.allocated_bytes[0].current;
}

torch::nn::Sequential wide_model(torch::ScalarType dtype) {
  torch::nn::Sequential module;
  for (int layer = 0; layer < 8; ++layer) {
    module->push_back(torch::nn::Linear(2048, 2048));
  }
  module->to(context().device(), dtype);
  return module;
}

// Device memory that the optimizer holds after two steps.
int64_t optimizer_bytes(torch::ScalarType dtype, bool zero1) {
  auto module = wide_model(dtype);
  DistributedDataParallel model(module, group());
  auto optimizer = make_optimizer(model, adamw(zero1));
  const auto input = torch::ones({16, 2048}, on_device().dtype(dtype));
  const auto backward = [&] {
    model.zero_grad();
    model.forward(input).to(torch::kFloat).sum().backward();
  };
  backward();
  backward();
  const int64_t before = allocated_bytes();
  optimizer->step(0.001);
  backward();
  optimizer->step(0.001);
  model.zero_grad();
  backward();
  return allocated_bytes() - before;
}

// Median of 9 times three replays.
template <typename Step>
double captured_ms(const Step& step) {
  at::cuda::CUDAGraph graph;
  warm_up_and_capture(graph, step);
  std::vector<double> times;
  for (int i = 0; i < 10; ++i) {
    torch::cuda::synchronize();
    group()->barrier();
    const auto begin = std::chrono::steady_clock::now();
    for (int replay = 0; replay < 3; ++replay) {
      graph.replay();
    }
    torch::cuda::synchronize();
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    times.push_back(took.count() / 3);
  }
  std::nth_element(times.begin() + 1, times.begin() + 5, times.end());  // the first one warms up
  return times[5];
}

}  // namespace

TEST_CASE("state takes a world_size-th of the memory") {
  const auto dtype = GENERATE(torch::kFloat, torch::kBFloat16);
  const int64_t numel = 8 * 2049 * 2048;
  const int64_t state = numel * 4 * (dtype == torch::kBFloat16 ? 3 : 2);
  const int64_t whole = optimizer_bytes(dtype, false);
  const int64_t sharded = optimizer_bytes(dtype, true);
  if (rank() == 0) {
    std::printf("AdamW over %.1f M %s parameters: %.1f MiB of state a rank, with zero1 %.1f MiB\n",
                static_cast<double>(numel) / 1e6, dtype == torch::kFloat ? "float32" : "bfloat16",
                static_cast<double>(whole) / (1 << 20), static_cast<double>(sharded) / (1 << 20));
  }
  constexpr int64_t kTables = 4 << 20;  // includes the allocator's rounding
  CHECK(whole >= state);
  CHECK(whole < state + kTables);
  CHECK(sharded >= state / world());
  CHECK(sharded < state / world() + kTables);
}

// 16 matrices of 2048 x 2048 (67 M parameters) in bfloat16 with float32 gradients and masters.
TEST_CASE("a captured step, whole and sharded", "[.bench]") {
  for (const bool zero1 : {false, true}) {
    torch::nn::Sequential module;
    for (int layer = 0; layer < 16; ++layer) {
      module->push_back(torch::nn::Linear(torch::nn::LinearOptions(2048, 2048).bias(false)));
    }
    module->to(context().device(), torch::kBFloat16);
    DistributedDataParallel model(module, group());
    auto optimizer = make_optimizer(model, adamw(zero1));
    const auto input = torch::randn({16384, 2048}, on_device().dtype(torch::kBFloat16));
    const auto rate = torch::full({}, 1e-4, on_device());
    const double ms = captured_ms([&] {
      model.zero_grad();
      const auto loss = model.forward(input).to(torch::kFloat).mean();
      loss.backward();
      optimizer->step(StepScalars{.lr = rate});
    });
    if (rank() == 0) {
      std::printf("%s: %.3f ms a step\n", zero1 ? "zero1" : "whole", ms);
      std::fflush(stdout);
    }
  }
}

TEST_CASE("captured sharded steps replay the eager bits") {
  enum class Kind { Plain, Clipped };
  const auto kind = GENERATE(Kind::Plain, Kind::Clipped);
  for (const double cap : bucket_caps()) {
    CAPTURE(cap, static_cast<int>(kind));
    Mlp captured_module;
    Mlp eager_module;
    DistributedDataParallel captured(captured_module, group(), with_cap(cap));
    DistributedDataParallel eager(eager_module, group(), with_cap(cap));
    const auto rule = adamw(true);
    auto captured_optimizer = make_optimizer(captured, rule);
    auto eager_optimizer = make_optimizer(eager, rule);
    AmpOptions amp;
    amp.grad_scaling = kind == Kind::Clipped ? GradScaling::On : GradScaling::Off;
    amp.init_scale = 8;
    GradScaler captured_scaler(amp);
    GradScaler eager_scaler(amp);
    auto input = torch::zeros({3, 4}, on_device());
    const auto rate = torch::full({}, 0.015625, on_device());
    const auto step = [&](auto& model, Optimizer& optimizer, GradScaler& scaler) {
      model.zero_grad();
      auto loss = scaler.scale(model.forward(input).sum());
      loss.backward();
      if (kind == Kind::Clipped) {
        scaler.clip_and_step(optimizer, StepScalars{.lr = rate}, 1.0);
      } else {
        optimizer.step(StepScalars{.lr = rate});
      }
      scaler.update();
    };
    for (int warm_up = 0; warm_up < 4; ++warm_up) {
      input.copy_(batch_of(rank(), 20 + warm_up, 4));
      step(captured, *captured_optimizer, captured_scaler);
      step(eager, *eager_optimizer, eager_scaler);
    }
    at::cuda::CUDAGraph graph;
    graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    step(captured, *captured_optimizer, captured_scaler);
    graph.capture_end();
    for (int replay = 0; replay < 8; ++replay) {
      input.copy_(batch_of(rank(), replay, 4));
      if (replay == 3 && kind == Kind::Clipped && rank() == 0) {
        input[0][0] = std::numeric_limits<float>::infinity();  // all ranks skip this step
      }
      rate.fill_(0.015625 / (1 + replay));
      graph.replay();
      step(eager, *eager_optimizer, eager_scaler);
      for (size_t i = 0; i < eager_module->parameters().size(); ++i) {
        CAPTURE(replay, i);
        REQUIRE(torch::equal(captured_module->parameters()[i].detach(),
                             eager_module->parameters()[i].detach()));
        REQUIRE(eager_module->parameters()[i].detach().isfinite().all().item<bool>());
      }
    }
    CHECK(captured_scaler.get_scale() == eager_scaler.get_scale());
  }
}
