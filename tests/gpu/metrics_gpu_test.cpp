// SPDX-License-Identifier: Apache-2.0
// The host runs ahead of the GPU: what is enqueued when the clock stops is training time.
#include <c10/cuda/CUDAFunctions.h>
#include <torch/torch.h>

#include <chrono>
#include <thread>

#include "ddp/train/metrics.hpp"
#include "support/catch.hpp"
#include "unit/train/thread_control_plane.hpp"

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

TEST_CASE("a pause of the clock waits for the steps enqueued before it") {
  const at::Device device(at::kCUDA, 0);
  const auto matrix = torch::rand({4096, 4096}, device);
  auto result = torch::empty_like(matrix);
  const auto enqueue = [&] {
    for (int i = 0; i < 50; ++i) {
      torch::mm_out(result, matrix, matrix);
    }
  };
  enqueue();
  c10::cuda::device_synchronize();
  const auto start = std::chrono::steady_clock::now();
  enqueue();
  c10::cuda::device_synchronize();
  const double on_gpu = seconds_since(start);

  testing::ThreadJob job(1);
  testing::ThreadControlPlane plane(job, 0);
  ddp::MetricsOptions options;
  options.dir = "";
  options.log_every = 0;
  ddp::Metrics metrics(plane, device, {}, options);
  metrics.end_step(0, {.num_samples = 1});
  c10::cuda::device_synchronize();
  enqueue();
  metrics.end_step(1, {.num_samples = 1});
  {
    ddp::Metrics::ClockPause pause(metrics);
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
  }
  const double counted = metrics.end_epoch(0).seconds;
  CHECK(counted >= 0.5 * on_gpu);
  CHECK(counted < 0.4 + on_gpu);
}
