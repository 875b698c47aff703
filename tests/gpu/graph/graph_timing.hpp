// SPDX-License-Identifier: Apache-2.0
// Times of GPU work inside a captured step.
#pragma once

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <vector>

namespace gpu_test {

/// Returns the microseconds of one `call`, captured `calls` times in a CUDA graph: the median of 9
/// times three replays. Runs `call` three times before, so that all measurements and allocations
/// are done.
template <typename Call>
double graph_us(const Call& call, int calls = 10) {
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  for (int i = 0; i < 3; ++i) {
    call();
  }
  torch::cuda::synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  for (int i = 0; i < calls; ++i) {
    call();
  }
  graph.capture_end();
  std::vector<double> times;
  for (int i = 0; i < 10; ++i) {
    torch::cuda::synchronize();
    const auto begin = std::chrono::steady_clock::now();
    // Several replays in a row hide the host's launch time behind the previous replay.
    for (int j = 0; j < 3; ++j) {
      graph.replay();
    }
    torch::cuda::synchronize();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    times.push_back(took.count() / (3 * calls));
  }
  std::nth_element(times.begin() + 1, times.begin() + 5, times.end());  // the first one warms up
  return times[5];
}

}  // namespace gpu_test
