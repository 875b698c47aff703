// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "support/multi_rank_main.hpp"

namespace ddp::test {

/// Captures `body` on its own stream, like a training step.
template <typename Body>
void capture(at::cuda::CUDAGraph& graph, const Body& body) {
  const auto device = ddp::test::context().device().index();
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(false, device));
  graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  body();
  graph.capture_end();
}

/// Runs `step` until buckets are rebuilt and NCCL is connected, then captures it on the current
/// stream.
template <typename Step>
void warm_up_and_capture(at::cuda::CUDAGraph& graph, const Step& step) {
  for (int warm_up = 0; warm_up < 4; ++warm_up) {
    step();
  }
  graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  step();
  graph.capture_end();
}

}  // namespace ddp::test
