// SPDX-License-Identifier: Apache-2.0
// Captured backwards of ops that write gradients straight into buckets, with shared and with frozen
// parameters: the gradients of plain LibTorch.
#include <ATen/cuda/CUDAGraph.h>

#include "capture.hpp"
#include "distributed/fused_op_models.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

/// Captures `events` of `runs`, and compares replays on new inputs with plain LibTorch.
void check_captured(OpRuns& runs, const std::string& events) {
  torch::Tensor inputs[] = {op_input(runs.op(), rank(), 0).detach(),
                            op_input(runs.op(), rank(), 1).detach()};
  const auto step = [&] {
    runs.ours.zero_grad();
    run_events(events, 0, [&](char which, int64_t) {
      return runs.wrapper(which).forward(inputs[which - 'a']);
    });
  };
  at::cuda::CUDAGraph graph;
  warm_up_and_capture(graph, step);
  for (int replay = 0; replay < 2; ++replay) {
    for (const char which : {'a', 'b'}) {
      inputs[which - 'a'].copy_(op_input(runs.op(), rank(), replay + which).detach());
    }
    graph.replay();
    runs.plain.zero_grad();
    run_events(events, replay, [&](char which, int64_t s) {
      return mean_loss(which == 'a' ? runs.plain.a : runs.plain.b, s);
    });
    runs.check();
  }
}

}  // namespace

TEST_CASE("captured backwards of models that share an op's parameters") {
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  for (const auto& op : fused_ops(context().device())) {
    for (const bool is_one : {false, true}) {
      for (const auto& events : {"aAbB", "abBA", "ab+"}) {
        CAPTURE(op.name, is_one, events);
        OpRuns runs(op, is_one);
        runs.wrap(/*both=*/true);
        check_captured(runs, events);
      }
    }
  }
}

TEST_CASE("captured backwards of an op with frozen parameters") {
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  for (const auto& op : fused_ops(context().device())) {
    for (const auto& trained : choices_of_trained(op)) {
      CAPTURE(op.name, trained);
      OpRuns runs(op, /*is_one=*/true);
      runs.wrap(/*both=*/false);
      runs.set_trained(trained);
      check_captured(runs, "aA");
    }
  }
}
