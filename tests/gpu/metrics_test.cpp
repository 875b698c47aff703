// SPDX-License-Identifier: Apache-2.0
// The host runs ahead of the GPU: work that is enqueued when the clock stops is training time.
#include <c10/cuda/CUDAFunctions.h>
#include <torch/torch.h>

#include <chrono>
#include <sstream>
#include <thread>

#include "ddp/train/metrics.hpp"
#include "support/catch.hpp"
#include "unit/train/metrics/metrics_on.hpp"
#include "unit/train/temporary_folder.hpp"
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
  auto metrics = testing::metrics_on(plane, options, {}, device);
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

TEST_CASE("a GPU's energy is that of the steps, in J") {
  const at::Device device(at::kCUDA, 0);
  const testing::TemporaryFolder folder;
  testing::ThreadJob job(1);
  testing::ThreadControlPlane plane(job, 0);
  ddp::MetricsOptions options;
  options.dir = folder.path();
  options.run_name = "run";
  options.progress = ddp::ProgressStyle::Off;
  options.log_every = 1;
  auto metrics = testing::metrics_on(plane, options, {}, device);
  metrics.end_step(0, {.num_samples = 1});
  const auto matrix = torch::rand({8192, 8192}, device);
  const auto start = std::chrono::steady_clock::now();
  while (seconds_since(start) < 1.5) {  // NVML updates its counter about every 0.1 s
    matrix.mm(matrix).sum().item<float>();
  }
  metrics.end_step(1, {.num_samples = 1});
  const double seconds = seconds_since(start);
  metrics.end_epoch(0);
  std::istringstream csv(testing::read_file(folder.file("run/steps.csv")));
  std::string header;
  std::string row;
  std::getline(csv, header);
  while (std::getline(csv, row) && row.rfind("2,", 0) != 0) {
  }
  INFO(header << "\n" << row);
  std::istringstream names(header), cells(row);
  double energy = -1;
  for (std::string name, cell; std::getline(names, name, ',') && std::getline(cells, cell, ',');) {
    if (name == "energy_j") {
      energy = std::stod(cell);
    }
  }
  CHECK(energy > 50 * seconds);  // an idle H200 takes 75 W, none exceeds 1,000
  CHECK(energy < 1500 * seconds);
}
