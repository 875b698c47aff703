// SPDX-License-Identifier: Apache-2.0
// A step with its reductions, captured in a CUDA graph and replayed on other inputs. The arena's
// memory never moves, a backward never waits on the host, and the communicator's stream joins the
// capture.
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/Sleep.h>

#include <cstdio>

#include "comm/tuning/group_choices.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "gpu/capture.hpp"
#include "ops/shared/timing_event.hpp"
#include "reduce/reducer.hpp"

using namespace ddp;
using namespace ddp::test;

TEST_CASE("a captured backward with its reductions replays like the eager one") {
  for (const double cap : bucket_caps()) {
    CAPTURE(cap);
    Mlp module;
    Mlp reference;
    DistributedDataParallel model(module, group(), with_cap(cap));
    auto input = torch::zeros({3, 4}, on_device());
    const auto step = [&] {
      model.zero_grad();
      model.forward(input).sum().backward();
    };
    at::cuda::CUDAGraph graph;
    warm_up_and_capture(graph, step);
    for (int replay = 0; replay < 5; ++replay) {
      input.copy_(batch_of(rank(), replay, 4));
      graph.replay();
      require_equal(grads_of(*module), mean_reference(reference, [&](Mlp& plain) {
                      return plain->forward(concatenated(replay, 4)).sum();
                    }));
    }
    // Eager again, in the same memory.
    input.copy_(batch_of(rank(), 9, 4));
    step();
    require_equal(grads_of(*module), mean_reference(reference, [&](Mlp& plain) {
                    return plain->forward(concatenated(9, 4)).sum();
                  }));
  }
}

TEST_CASE("a captured weighted step replays") {
  Mlp module;
  Mlp reference;
  DistributedDataParallel model(module, group());
  auto input = torch::zeros({4, 4}, on_device());
  const auto step = [&] {
    model.zero_grad();
    model.weighted_backward(model.forward(input).sum(), 4);
  };
  at::cuda::CUDAGraph graph;
  warm_up_and_capture(graph, step);
  for (int replay = 0; replay < 3; ++replay) {
    input.copy_(batch_of(rank(), replay, 4, 4));
    graph.replay();
    auto expected = mean_reference(
        reference, [&](Mlp& plain) { return plain->forward(concatenated(replay, 4, 4)).sum(); });
    for (auto& grad : expected) {
      grad.div_(4);
    }
    require_equal(grads_of(*module), expected);
  }
}

TEST_CASE("a mark inside a graph is taken anew by every replay") {
  const auto device = context().device();
  ddp::ops::detail::TimingEvent begin;
  ddp::ops::detail::TimingEvent end;
  begin.record(device);
  end.record(device);
  auto work = torch::zeros({1 << 20}, on_device());
  at::cuda::CUDAGraph graph;
  graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  begin.record_replayed(device);
  work.add_(1);
  ddp::ops::detail::delay_device(device, 10);
  end.record_replayed(device);
  graph.capture_end();
  CHECK(ddp::ops::detail::TimingEvent::milliseconds(begin, end) <
        5);  // no replay yet: the eager marks
  for (int replay = 0; replay < 3; ++replay) {
    begin.record(device);  // recorded eagerly between replays
    graph.replay();
    const double took = ddp::ops::detail::TimingEvent::milliseconds(begin, end);
    CHECK(took > 5);
    CHECK(took < 40);
  }
}

TEST_CASE("each replay tells how long it waited for reductions") {
  if (world() == 1) {
    return;
  }
  Mlp module;
  DistributedDataParallel model(module, group());
  auto input = torch::zeros({3, 4}, on_device());
  const auto step = [&] {
    model.zero_grad();
    model.forward(input).sum().backward();
  };
  at::cuda::CUDAGraph graph;
  warm_up_and_capture(graph, step);
  const auto replay_ms = [&](bool late) {
    group()->barrier();
    if (late && rank() == 1) {
      at::cuda::sleep(80'000'000);  // 40 ms or longer
    }
    graph.replay();
    return model.exposed_communication_ms();
  };
  replay_ms(false);
  for (int round = 0; round < 2; ++round) {
    const double waited = replay_ms(true);
    CHECK((rank() == 1 || waited > 20));
    const double at_once = replay_ms(false);
    CHECK(at_once > 0);
    CHECK(at_once < 20);
  }
}

TEST_CASE("automatic buckets: chosen from the device's times, then captured") {
  DdpOptions options;
  options.bucket_cap_mb = kAutoBuckets;
  const auto comm = group()->split(0, rank());
  torch::nn::Sequential module;
  for (int layer = 0; layer < 12; ++layer) {
    module->push_back(torch::nn::Linear(1024, 1024));
  }
  module->to(context().device());
  DistributedDataParallel model(module, comm, options);
  auto input = torch::ones({2048, 1024}, on_device());
  const auto step = [&] {
    model.zero_grad();
    model.forward(input).sum().backward();
  };
  for (int warm_up = 0; warm_up < 5; ++warm_up) {
    step();
  }
  const auto eager = grads_of(*module);
  if (world() > 1) {
    CHECK(model.reducer().gradients().layout().buckets.size() > 1);  // 48 MiB take about 4 ms
    CHECK_FALSE(comm->choices().plan().empty());
  }
  at::cuda::CUDAGraph graph;
  graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  step();
  graph.capture_end();
  for (int replay = 0; replay < 3; ++replay) {
    graph.replay();
    const auto replayed = grads_of(*module);
    for (size_t i = 0; i < eager.size(); ++i) {  // require_equal would print a million numbers
      INFO("parameter " << i);
      REQUIRE(torch::equal(replayed[i], eager[i]));
    }
  }
  if (rank() == 0) {
    std::printf("plan: %s\n", comm->choices().plan().to_json().c_str());
  }
}

TEST_CASE("find_unused_parameters refuses to be captured") {
  DdpOptions options;
  options.find_unused_parameters = true;
  Mlp module;
  DistributedDataParallel model(module, group(), options);
  auto input = torch::zeros({3, 4}, on_device());
  for (int warm_up = 0; warm_up < 4; ++warm_up) {
    model.zero_grad();
    model.forward(input).sum().backward();
  }
  at::cuda::CUDAGraph graph;
  graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  model.zero_grad();
  REQUIRE_THROWS_WITH(model.forward(input), Catch::Contains("captured"));
  graph.capture_end();
}

TEST_CASE("a captured step with its update replays the eager bits") {
  OptimizerOptions rule;
  rule.type = OptimizerType::AdamW;
  for (const double cap : bucket_caps()) {
    CAPTURE(cap);
    Mlp captured_module;
    Mlp eager_module;
    DistributedDataParallel captured(captured_module, group(), with_cap(cap));
    DistributedDataParallel eager(eager_module, group(), with_cap(cap));
    auto captured_optimizer = make_optimizer(captured, rule);
    auto eager_optimizer = make_optimizer(eager, rule);
    auto input = torch::zeros({3, 4}, on_device());
    const auto rate = torch::full({}, 0.015625, on_device());
    const auto step = [&](auto& model, Optimizer& optimizer) {
      model.zero_grad();
      model.forward(input).sum().backward();
      optimizer.step(StepScalars{.lr = rate});
    };
    for (int warm_up = 0; warm_up < 4; ++warm_up) {
      input.copy_(batch_of(rank(), 20 + warm_up, 4));
      step(captured, *captured_optimizer);
      step(eager, *eager_optimizer);
    }
    at::cuda::CUDAGraph graph;
    graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    step(captured, *captured_optimizer);
    graph.capture_end();
    for (int replay = 0; replay < 8; ++replay) {
      input.copy_(batch_of(rank(), replay, 4));
      rate.fill_(0.015625 / (1 + replay));
      graph.replay();
      step(eager, *eager_optimizer);
      for (size_t i = 0; i < eager_module->parameters().size(); ++i) {
        REQUIRE(torch::equal(captured_module->parameters()[i].detach(),
                             eager_module->parameters()[i].detach()));
      }
    }
  }
}
